"""nmt-completion: scripts with which a shell completes commands, options, files, configs and settings.

shtab writes the scripts from the parsers, for bash, zsh and fish alike, so that a TAB starts no Python
(argcomplete would start the command itself each time) and an option need not be registered anywhere else. Only
our own words, the names of configs and settings, need a line for each shell.
"""

import argparse
import importlib
import pkgutil
import re
import sys
from collections.abc import Sequence
from typing import Any

from nmt.commands.cli import make_parser, start_command
from nmt.system.extras import import_extra

EXAMPLES = """\
  source <(nmt-completion bash)                         in ~/.bashrc
  eval "$(nmt-completion zsh)"                          in ~/.zshrc, after compinit
  nmt-completion fish | source                          in ~/.config/fish/config.fish

It needs the package shtab: pip install 'nmtkit[completion]'."""

SHELLS = ("bash", "zsh", "fish")

# In each shell a function for configs, one for settings, and one for settings of a trained model, which
# may follow a folder. In bash, no space follows a setting's "=" or a folder.
PREAMBLES = {
    "bash": """\
_nmt_config_files() { compgen -W "CONFIGS" -- "$1"; compgen -f -- "$1"; }
_nmt_settings() { compgen -W "SETTINGS" -- "$1"; }
_nmt_models() { compgen -W "DECODING" -- "$1"; compgen -d -S / -- "$1"; }
_nmt_complete() {
  "_shtab_${1//-/_}" "$@"
  [[ ${#COMPREPLY[@]} = 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace
  return 0
}
""",
    "zsh": """\
_nmt_config_files() { compadd -- CONFIGS; _files }
_nmt_settings() { compadd -S '' -- SETTINGS }
_nmt_models() { compadd -S '' -- DECODING; _files -/ }
""",
    "fish": """\
function _nmt_config_files; printf '%s\\n' CONFIGS; __fish_complete_path (commandline -ct); end
function _nmt_settings; printf '%s\\n' SETTINGS; end
function _nmt_models; printf '%s\\n' DECODING; __fish_complete_directories; end
""",
}


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "nmt-completion", "Print the script with which a shell completes all commands.", EXAMPLES
    )
    parser.add_argument("shell", choices=SHELLS, help="your shell")
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return build_parser().parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    return start_command("nmt-completion", parse_arguments, print_completion, argv)


def print_completion(args: argparse.Namespace) -> int:
    shell = args.shell
    shtab = import_extra("shtab")
    from nmt import commands
    from nmt.config import list_config_names, list_setting_keys

    settings = [f"{key}=" for key in list_setting_keys()]
    later = [word for word in settings if word.startswith(("decoding.", "device"))]
    preamble = PREAMBLES[shell].replace("CONFIGS", " ".join(list_config_names()))
    preamble = preamble.replace("SETTINGS", " ".join(settings))
    print(preamble.replace("DECODING", " ".join(later)))
    for module in pkgutil.iter_modules(commands.__path__, "nmt.commands."):
        command = importlib.import_module(module.name)
        if "build_parser" not in vars(command):
            continue  # what commands share
        parser = command.build_parser()
        for action in parser._actions:
            choose_completion(action, shell, shtab.FILE, shtab.DIRECTORY)
        script = shtab.complete(parser, shell)
        if shell == "zsh":
            # shtab 1.13 completes only the first of several, and looks for subcommands, of which there are none
            script = re.sub(r'^  "\(\*\)::?', '  "*:', script, flags=re.MULTILINE)
            script = script.replace("_defaults_added=0", "_defaults_added=1")
        print(script)
        if shell == "bash":
            print(f"complete -o bashdefault -F _nmt_complete {parser.prog}")
    return 0


def choose_completion(action: argparse.Action, shell: str, file: Any, folder: Any) -> None:
    """Choose how an argument's value is completed, by the name that --help gives it."""
    called = str(action.metavar)
    if "--config" in action.option_strings:
        chosen = _call("_nmt_config_files", shell)
    elif called == "section.key=value":
        chosen = _call("_nmt_settings", shell)
    elif "CHECKPOINT" in called and not action.option_strings:
        chosen = _call("_nmt_models", shell)
    elif "FILE" in called or action.nargs == 2:  # two systems
        chosen = file
    elif re.search("DIR|STORE|CHECKPOINT|RUN|REVERSE$", called):
        chosen = folder
    else:
        return
    vars(action)["complete"] = chosen


def _call(function: str, shell: str) -> dict[str, str]:
    return {shell: f"({function})" if shell == "fish" else function}


if __name__ == "__main__":
    sys.exit(main())
