"""The command line: ``molt fit | validate | test | predict | try``.

A subcommand is a method of Lightning's Trainer; a key of the configuration is a constructor
parameter. Nothing heavy is imported before the command is known.
"""

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

HELP = """usage: molt COMMAND --config FILE [--config FILE] [--KEY VALUE ...]

Train agents with reinforcement learning.

commands:
  fit       train a policy
  validate  score the task sets; builds no optimizer
  test      score the task sets with the weights of --ckpt_path
  predict   roll out the tasks and write every trajectory to the run folder
  try       roll out a few tasks and print them: the first thing to do with a new environment
  audit     prove from the ledger in a run folder what was trained: molt audit RUN

`molt COMMAND --help` lists the keys; `molt COMMAND --config FILE --print_config` shows the
configuration that a run would use.
"""

COMMANDS = ("fit", "validate", "test", "predict", "try", "audit")

TRY = (
    "--trainer.limit_predict_batches=1",
    "--trainer.logger=false",
    "--data.groups_per_step=2",
    "--data.group_size=2",
)
"""What ``try`` is: a ``predict`` of two tasks that leaves nothing behind."""


def main(args: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        args: Command line without the program's name.
    """
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(HELP)
        return
    command = args[0]
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        sys.exit(f"molt: there is no command {command!r}{hint}")
    if command == "audit":
        print_audit(args[1:])
        return
    if command == "try":
        args = ["predict", *args[1:], *TRY]
    # A console script does not have the working directory on its path, where a user's
    # `class_path: my_env.MyEnv` lives. Other ranks are started by running sys.argv again.
    sys.path.insert(0, os.getcwd())
    sys.argv[1:] = args
    # Ray's local clusters ask for a token; every process must agree on that before it imports Ray.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from molt.configuration import MoltCLI

    MoltCLI()


def print_audit(args: Sequence[str]) -> None:
    """Print what the ledger of a run proves, or exit with the sentence that says what it does not.

    Args:
        args: The run folder.
    """
    if len(args) != 1:
        sys.exit("usage: molt audit RUN")
    from molt.audit import AuditError, audit

    try:
        rows = audit(Path(args[0]))
    except AuditError as error:
        sys.exit(f"molt audit: {error}")
    width = max(map(len, rows))
    sys.stdout.write("".join(f"{name:<{width}}  {value}\n" for name, value in rows.items()))


if __name__ == "__main__":
    main()
