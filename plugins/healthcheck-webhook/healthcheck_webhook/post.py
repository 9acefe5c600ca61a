"""One POST over a connection to an address that was looked at. Redirects are not followed, proxies are not used."""

from __future__ import annotations

import http.client
import socket
import ssl

from healthcheck import NotSent

from healthcheck_webhook.address import Address, BadAddress


class _Connection(http.client.HTTPConnection):
    """Connects to a numeric address, and speaks to the host by its name."""

    def __init__(self, address: Address, numeric: str, timeout: float) -> None:
        super().__init__(address.host, address.port, timeout=timeout)
        self._numeric = numeric
        self._context = ssl.create_default_context() if address.secure else None

    def connect(self) -> None:
        sock = socket.create_connection((self._numeric, self.port), self.timeout)
        self.sock = self._context.wrap_socket(sock, server_hostname=self.host) if self._context else sock


def post(address: Address, body: bytes, timeout: float) -> None:
    """Raises ``NotSent`` with a reason that says nothing about the address."""
    try:
        numeric = address.resolve()[0]
    except BadAddress as error:
        raise NotSent(str(error), again=False) from None
    except OSError:
        raise NotSent("the name of its host cannot be resolved") from None
    connection = _Connection(address, numeric, timeout)
    try:
        headers = {"Content-Type": "application/json", "User-Agent": "healthcheck-webhook", "Connection": "close"}
        connection.request("POST", address.path, body, headers)
        answer = connection.getresponse()
        status, after = answer.status, answer.headers.get("Retry-After", "")
    except ssl.SSLError:
        raise NotSent("its certificate or encryption was not accepted", again=False) from None
    except TimeoutError:
        raise NotSent("no answer in time") from None
    except (OSError, http.client.HTTPException) as error:
        raise NotSent(f"no connection ({type(error).__name__})") from None
    finally:
        connection.close()
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise NotSent(f"it redirects ({status}), which is not followed: use the final address", again=False)
    again = status in (408, 425, 429) or status >= 500
    raise NotSent(f"it answered {status}", again=again, after=float(after) if after.isdigit() else None)
