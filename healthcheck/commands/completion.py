"""``healthcheck completion bash``: a script for your shell, which then asks us what may come next."""

from __future__ import annotations

import argparse
import contextlib
import io
from typing import TYPE_CHECKING

from healthcheck.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "completion"
HELP = "completion of commands, options, rules and runs for your shell"

_BASH = """\
_healthcheck() {
    local IFS=$'\\n'
    COMPREPLY=($("${COMP_WORDS[0]}" completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    return 0
}
complete -o default -F _healthcheck healthcheck torch-healthcheck
"""

_ZSH = """\
#compdef healthcheck torch-healthcheck
_healthcheck() {
    local -a found
    found=("${(@f)$("${words[1]}" completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    found=(${found:#})
    if (( ${#found} )); then compadd -a found; else _files; fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _healthcheck "$@"; else compdef _healthcheck healthcheck torch-healthcheck; fi
"""

_FISH = """\
function __healthcheck_words
    set -l typed (commandline -opc) (commandline -ct)
    set -l found ($typed[1] completion --words $typed[2..-1] 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c healthcheck -f -a '(__healthcheck_words)'
complete -c torch-healthcheck -f -a '(__healthcheck_words)'
"""

SCRIPTS: Mapping[str, str] = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "bash:  healthcheck completion bash > ~/.local/share/bash-completion/completions/healthcheck\n"
        "zsh:   healthcheck completion zsh > ~/.zfunc/_healthcheck      (a folder of $fpath)\n"
        "fish:  healthcheck completion fish > ~/.config/fish/completions/healthcheck.fish\n"
        'at once, in this shell:  eval "$(healthcheck completion bash)"'
    )
    parser.add_argument("shell", nargs="?", metavar="SHELL", help=", ".join(SCRIPTS))
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    if args.words is not None:
        found = _candidates(args.words)
        print("\n".join(found), end="\n" if found else "")
        return 0
    if args.shell not in SCRIPTS:
        from healthcheck.dispatch import suggest

        known = ", ".join(SCRIPTS)
        if args.shell is None:
            raise UsageError(f"healthcheck completion: which shell? healthcheck completion bash (or one of {known})")
        hint = suggest(args.shell, SCRIPTS) or f"there are {known}"
        raise UsageError(f'healthcheck completion: no script for the shell "{args.shell}"; {hint}')
    print(SCRIPTS[args.shell], end="")
    return 0


def _candidates(words: list[str]) -> list[str]:
    """Never an error or a word on the terminal: a person is in the middle of typing."""
    from healthcheck.commands import TABLE
    from healthcheck.commands.completing import candidates

    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception, SystemExit):
        return candidates(words, TABLE)
    return []
