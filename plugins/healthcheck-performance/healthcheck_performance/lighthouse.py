"""``healthcheck lighthouse``: the server at which replica groups of torchft meet."""

from __future__ import annotations

import argparse
import sys
import time

from healthcheck_performance.tolerance import FaultToleranceParameters, start_lighthouse

LIGHTHOUSE_HELP = "start the server at which replica groups of a fault-tolerant training meet (torchft's Lighthouse)"


def lighthouse(argv: list[str]) -> int:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser("healthcheck lighthouse", description=LIGHTHOUSE_HELP, allow_abbrev=False)
    parser.add_argument("--bind", default="[::]:29510", metavar="HOST:PORT", help="(%(default)s)")
    parser.add_argument(
        "--min-replicas", type=int, default=1, metavar="N", help="groups that must be there to train (1)"
    )
    parser.add_argument(
        "--heartbeat-interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="of the groups; a group is dead after three (1)",
    )
    args = parser.parse_args(argv)
    parameters = FaultToleranceParameters(
        heartbeat_interval=args.heartbeat_interval, min_replica_size=args.min_replicas
    )
    server = start_lighthouse(parameters, args.bind)
    sys.stdout.write(f"TORCHFT_LIGHTHOUSE={server.address()}\n")
    sys.stdout.flush()
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        server.shutdown()
    return 0
