"""The commands of ``gradmon``: what they take and what their help says. What runs one is imported once it runs, and torch with it."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.resources import files
from typing import Any, NamedTuple, NoReturn

from ..server import PORT

#: Command lines, each with its purpose, the most useful first.
Examples = Sequence[tuple[str, str]]
#: The names of an option, and what argparse takes with them.
Argument = tuple[tuple[str, ...], dict[str, Any]]
#: Width of the first column of examples; the purpose of a longer command is on the next line.
_COLUMN = 46
#: Width of the help texts that argparse does not wrap.
_WIDTH = 79
#: More parameters than this are grouped by block in a summary.
MOST = 40
#: Columns of a summary by which it can be sorted; the largest value comes first.
SORTS = ("norm", "largest", "at", "share", "clipped", "update", "zeros", "nonfinite")


class Command(NamedTuple):
    """A command as ``gradmon --help`` shows it."""

    name: str  # as on the command line
    summary: str  # one line for the list of commands
    description: str  # for its own help
    examples: Examples  # at the end of its help
    arguments: Sequence[Argument | list[Argument]]  # a list of arguments excludes each other
    # the function in ``commands`` that runs it and returns its exit code: 0, or 1 for a bad result. A UsageError is printed on one line
    # with the exit code 2, an OSError or ValueError with 1.
    function: str
    notes: str = ""  # paragraphs after the examples

    def run(self, options: argparse.Namespace) -> int:
        module, _, name = self.function.partition(".")
        code: int = getattr(import_module(f".commands.{module}", __package__), name)(options)
        return code

    def add_to(self, commands: Any) -> None:
        lines = ["examples:", *example_lines(self.examples)]
        for paragraph in self.notes.split("\n\n") if self.notes else ():
            lines += ["", *textwrap.wrap(" ".join(paragraph.split()), _WIDTH, break_on_hyphens=False)]
        parser = commands.add_parser(
            self.name,
            help=self.summary,
            description=textwrap.fill(self.description, _WIDTH),
            epilog="\n".join(lines),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for each in self.arguments:
            group = parser.add_mutually_exclusive_group() if isinstance(each, list) else parser
            for names, options in each if isinstance(each, list) else [each]:
                group.add_argument(*names, **options)


def example_lines(examples: Examples) -> Iterator[str]:
    for command, purpose in examples:
        if len(command) <= _COLUMN:
            yield f"  {command:<{_COLUMN}}  {purpose}".rstrip()
        else:
            yield f"  {command}"
            yield f"      {purpose}"


# --- arguments ---


def argument(*names: str, **options: Any) -> Argument:
    return names, options


def value(name: str, metavar: str, help: str, **options: Any) -> Argument:
    """An option that takes a value; a default that is shown is appended to ``help``."""
    if options.get("default") not in (None, []):
        help += " (default: %(default)s)"
    return argument(name, metavar=metavar, help=help, **options)


def flag(name: str, help: str) -> Argument:
    return argument(name, action="store_true", help=help)


def output_file(help: str, required: bool = False) -> Argument:
    return argument("-o", "--output", metavar="FILE", required=required, help=help)


def _number(what: str, low: float, high: float, is_whole: bool = True) -> Callable[[str], float]:
    """What turns the text of an option into a number from ``low`` to ``high``."""

    def converted(text: str) -> float:
        try:
            found = int(text) if is_whole else float(text)
        except ValueError:
            found = math.nan
        if not low <= found <= high or (is_whole and not text.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text[:100]!r} is not {what}")
        return found

    return converted


positive = _number("a positive whole number", 1, 10**99)
step_number = _number("the number of a step", 0, 10**99)
seconds = _number("a number of seconds from 0.05 to 3600", 0.05, 3600, is_whole=False)
port = _number("a port from 0 to 65535", 0, 65535)


class _PrintSchema(argparse.Action):
    """Prints the JSON schema of its command, and ends, as ``--help`` does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        schema = files("torch_gradmon.cli").joinpath("schemas").joinpath(f"{parser.prog.rpartition(' ')[2]}.json")
        print(schema.read_text(encoding="utf-8"), end="")
        parser.exit()


RUN = argument("run", metavar="RUN", help="a run directory; the run may still go on")
JSON = [
    flag("--json", "print JSON, for a program"),
    argument("--json-schema", action=_PrintSchema, nargs=0, help="print the JSON schema of that (draft 2020-12) and end"),
]
FIRST = value("--first", "STEP", "from this step on", type=int)
LAST = value("--last", "STEP", "up to this step", type=int)

# --- the commands ---

#: As ``gradmon --help`` groups them.
GROUPS = {
    "see what it is, and whether all of it is there": ("demo", "doctor"),
    "look at a run, which may still go on": ("report", "summary", "status", "live", "diagnose", "why", "export"),
    "look at several": ("serve", "compare", "diff"),
    "give runs to agents": ("mcp",),
    "change what a running training measures": ("detail",),
    "check a model before it is trained": ("width-sweep",),
}
_COMMANDS = (
    Command(
        "demo",
        "train a small character GPT under watch and show a table of its layers",
        "Train a small character GPT under watch and show a table of its layers.",
        (
            ("gradmon demo", "train a small GPT: a minute, no network"),
            ("gradmon demo --steps 101 --run-dir runs/short", "fewer steps, in another directory"),
            ("gradmon demo -o table.svg", "write the tables as a picture"),
        ),
        (
            value("--steps", "N", "steps to train", type=positive, default=601),
            value("--run-dir", "DIR", "where to write the run", default="runs/demo"),
            output_file("the printed tables as a picture, .svg"),
            value("--seed", "N", "of parameters and batches", type=int, default=0),
        ),
        "training.demo_command",
    ),
    Command(
        "doctor",
        "what this installation uses: kernels, torch, devices, packages",
        "Show what computes the statistics on each device and why, which optional packages there are, and whether the numbers are right.",
        (
            ("gradmon doctor", "why is it slow here, and what is missing?"),
            ("gradmon doctor --json", "the same, for a program or for a bug report"),
        ),
        (JSON,),
        "doctor.run",
        "The exit code is 1 if statistics of random numbers differ from those in float64, or if monitors are off.",
    ),
    Command(
        "report",
        "write one page about a run: findings, layers over steps, norms, updates",
        "Write one self-contained HTML file about a run: what is wrong, all layers over the steps, the gradient norm before and after "
        "clipping, one step over the depth, updates, the layers that deviate most, and a table to search.",
        (
            ("gradmon report runs/first", "one HTML page that needs no network"),
            ("gradmon report runs/first -o first.html --title 'first try'", "with another place and title"),
            ("gradmon report runs/first runs/second", "both runs, and where they diverge"),
        ),
        (
            RUN,
            argument("other", metavar="OTHER", nargs="?", help="another run to compare with; see also gradmon diff -o"),
            output_file("the page, .html (default: report.html in the run directory, or against-RUN.html in that of OTHER)"),
            value("--title", "TEXT", "of the page (default: the name of the run directory)"),
        ),
        "one_run.report",
    ),
    Command(
        "summary",
        "show what a run and its layers did",
        "Show what a run, its whole-model values and its layers did; the run may still go on.",
        (
            ("gradmon summary runs/first", "what the run and its layers did"),
            ("gradmon summary runs/first --sort share --tail 100", "which layers hold the gradient now"),
            ("gradmon summary runs/first --keys attn --all", "each parameter with attn in its name"),
            ("gradmon summary runs/first --depth 1", "by the first part of their names"),
            ("gradmon summary runs/first --json", "the same for a program"),
        ),
        (
            RUN,
            [
                flag("--all", f"every parameter and logged value (default: blocks, if more than {MOST} parameters)"),
                value("--depth", "N", "group parameters by the first N parts of their names", type=positive),
            ],
            value("--keys", "REGEX", "only parameters whose names match"),
            value("--sort", "COLUMN", f"one of name, {', '.join(SORTS)} (default: as in the model)", choices=["name", *SORTS]),
            value("--tail", "N", "only the last N steps", type=positive),
            JSON,
        ),
        "one_run.summary",
    ),
    Command(
        "status",
        "how a run is, and what to do next",
        "Show in a few lines whether a run is alive, where its loss is, what is wrong, and what to do next. The run may still go on.",
        (
            ("gradmon status runs/first", "alive? learning? what to do next?"),
            ("gradmon status runs/first --json", "the same for a program"),
        ),
        (RUN, JSON),
        "one_run.status",
        "The exit code is 0 if the run is alive or has ended and nothing graver than information was found, 1 otherwise, as for a run that "
        "an exception ended or whose steps are lost on a full disk, and 2 if there is no such run.",
    ),
    Command(
        "live",
        "show a run live in the terminal",
        "Show a run live in the terminal: losses, gradient norms before and after clipping, spikes, and the layers that deviate most. The "
        "run directory is only read; the training never waits.",
        (
            ("gradmon live runs/first", "live, until Ctrl-C"),
            ("gradmon live runs/next --wait", "also before the run has begun"),
            ("gradmon live runs/first --tail 5000 --interval 5", "more steps, and less often"),
            ("gradmon live runs/first --once", "one picture of its current state"),
            ("gradmon live runs/first --alert https://example.org/hook", "call a webhook about it, also without a terminal"),
        ),
        (
            RUN,
            value("--interval", "SECONDS", "between updates", type=seconds, default=1.0),
            value("--tail", "N", "only the last N steps", type=positive, default=600),
            flag("--wait", "wait for a run that has not begun yet"),
            flag("--once", "print one picture and end"),
            value("--alert", "URL", "a webhook that is called when the run stalls, and about new spikes and findings"),
        ),
        "live.live",
        "Sparklines show the largest value of the steps in a column, on a logarithmic scale; ! is NaN or infinite.",
    ),
    Command(
        "diagnose",
        "find what is wrong with a run, where, and what to do",
        "Find what is wrong with a run, where, and what to do. The run may have ended, still go on, or have been killed.",
        (
            ("gradmon diagnose runs/first", "what is wrong, where, and what to do"),
            ("gradmon diagnose runs/first --json", "the same for a program"),
        ),
        (RUN, JSON),
        "one_run.diagnose_run",
        "The exit code, for CI, is 0 if nothing graver than information was found, 1 if something was, and 2 if there is no such run.",
    ),
    Command(
        "why",
        "explain a spike",
        "Explain a spike: the signals around it, which parameters moved first, and the steps after it; or say that there is none.",
        (
            ("gradmon why runs/first", "explain the largest spike"),
            ("gradmon why runs/first --step 300", "explain that step"),
            ("gradmon why runs/first --json", "the same for a program"),
        ),
        (RUN, value("--step", "STEP", "the step to explain (default: the worst step of the largest spike)", type=int), JSON),
        "one_run.why",
    ),
    Command(
        "export",
        "write a run as Parquet, CSV or JSON lines",
        "Write a run into files for other programs.",
        (
            ("gradmon export runs/first -o out.parquet", "all layers; the loss in out.steps.parquet"),
            ("gradmon export runs/first -o steps.csv --table steps", "a row for each step, for a spreadsheet"),
            ("gradmon export runs/first -o gradients.jsonl --source gradient_before_clip --last 99", "a part of it"),
        ),
        (
            RUN,
            output_file("the file, which ends in .parquet, .csv or .jsonl", required=True),
            argument("--table", choices=("tensors", "steps"), help="only one of them, into that file (default: both)"),
            value("--source", "NAME", "of tensors, such as gradient; repeatable (default: all)", action="append"),
            FIRST,
            LAST,
        ),
        "one_run.export",
        """The table "tensors" has a row for each tensor in each step, with a column for each metric. The table "steps" has a row for each
    step, with the values of the whole model, logged values, learning rates, tags and spikes. CSV and JSON lines need no package, Parquet
    needs pyarrow: pip install "torch_gradmon[export]". In Python use run.export(), run.to_arrow() and run.to_pandas().""",
    ),
    Command(
        "serve",
        "show runs in a browser, live",
        "Show the runs below a directory in a browser while they train: a list of all, the report of each with every new step, and two "
        "over each other. Run directories are only read; no training waits.",
        (
            ("gradmon serve runs", "all runs, on this machine"),
            ("gradmon serve runs/first --port 0", "one run, at any free port"),
            ("gradmon serve runs --host 0.0.0.0", "for other machines"),
            ("gradmon serve runs --alert https://example.org/hook", "call a webhook about stalled runs, spikes and findings"),
        ),
        (
            argument("root", metavar="DIRECTORY", help="a directory with runs in it, or a run"),
            value("--port", "PORT", "of the page, 0 for any free one", type=port, default=PORT),
            value("--host", "ADDRESS", "to listen at", default="127.0.0.1"),
            value("--alert", "URL", "a webhook that is called about runs that stall, new spikes and findings"),
            value("--token", "TEXT", "that the address has to contain (default: a new one)"),
            flag("--no-token", "let every account of this machine read"),
        ),
        "live.serve",
        "Whoever has the printed address can read: it contains a token, new for each server. Only this machine is served by "
        "default; at another address nothing is encrypted, and a tunnel such as ssh -L 8642:localhost:8642 HOST is better.",
    ),
    Command(
        "compare",
        "show many runs in one table",
        "Show many runs in one table: whether they are alive, their losses, findings, spikes and cost, and the settings in which they "
        "differ. For two runs step by step see gradmon diff, and for the same in a browser gradmon serve.",
        (
            ("gradmon compare runs", "all below a directory, the smallest loss first"),
            ("gradmon compare runs --sort val/loss", "the smallest last value of a metric first"),
            ("gradmon compare runs --sort val/acc --largest", "the largest one first"),
            ("gradmon compare runs/a runs/b --sort started", "some runs, in the order of their beginnings"),
            ("gradmon compare runs --diagnose", "with all rules, a third of a second for each run"),
            ("gradmon compare runs --json", "the same for a program"),
        ),
        (
            argument("runs", metavar="DIRECTORY", nargs="+", help="runs, or directories with runs in them; they may still go on"),
            value(
                "--sort",
                "COLUMN",
                "one of name, loss, step, spikes, cost, started, a setting, or a logged value, which is shown, too",
                default="loss",
            ),
            flag("--largest", "the largest value first"),
            flag("--diagnose", "apply all rules to each run, not only those that the training itself applies"),
            JSON,
        ),
        "several.compare",
    ),
    Command(
        "diff",
        "find the first step and value in which two runs diverge",
        "Compare two runs, such as of one seed before and after a change of the code, and find where they diverge.",
        (
            ("gradmon diff runs/a runs/b", "the first step and value in which they diverge"),
            ("gradmon diff runs/before runs/after --rtol 1e-4 --last 99", "a refactoring, by its first hundred steps"),
            ("gradmon diff runs/a runs/b --rtol 0", "bit for bit: is the training deterministic?"),
            ("gradmon diff runs/a runs/b --rename '^h\\.=layers.' --strict", "renamed modules, and no other change"),
            (
                "gradmon diff runs/a runs/b --tol '^update/=1e-3' --ignore 'k_proj\\.bias'",
                "wider for some keys, and without others",
            ),
            ("gradmon diff runs/a runs/b -o diff.html", "also a page with both runs on top of each other"),
            ("gradmon diff runs/a runs/b --json", "everything, for programs"),
        ),
        (
            argument("a", metavar="A", help="a run directory"),
            argument("b", metavar="B", help="another run directory"),
            value("--rtol", "X", "tolerance relative to the larger value", type=float, default=1e-5),
            value("--atol", "X", "absolute tolerance, added to that", type=float, default=0.0),
            value("--tol", "REGEX=X", "a relative tolerance for some keys", action="append", default=[]),
            value("--keys", "REGEX", "compare only these keys", action="append"),
            value("--ignore", "REGEX", "do not compare these keys", action="append"),
            value("--rename", "REGEX=NEW", "in names of modules of A, as they are in B", action="append", default=[]),
            FIRST,
            LAST,
            flag("--strict", "steps, tensors and values that only one run has count too"),
            output_file("one page, .html, with both runs on top of each other"),
            JSON,
        ),
        "several.diff",
        "Patterns are searched in keys such as gradient_before_clip/h.0.attn.weight/norm, as with re.search; options that take one may be "
        "repeated. The exit code is 0 if the runs are equal within the tolerance in all that both have, 1 if they diverge, and 2 if they "
        "cannot be compared.",
    ),
    Command(
        "mcp",
        "tools for agents that read runs",
        "Serve tools by the Model Context Protocol on stdin and stdout: list runs, their status and diagnosis, explain a spike, series of "
        "values, and the difference of two runs. They read the runs below a directory and change nothing.",
        (("gradmon mcp runs", "the command that an agent's configuration names"),),
        (argument("root", metavar="DIRECTORY", help="a directory with runs in it, or a run"),),
        "several.mcp",
    ),
    Command(
        "detail",
        "change what a running training measures",
        "Change how often a running training is monitored, and what is measured, for a while, without a restart.",
        (
            ("gradmon detail runs/first --every 1 --preset full --for 200", "everything, in the next 200 steps"),
            ("gradmon detail runs/first --every 10 --wait", "every 10th step until further notice"),
            ("gradmon detail runs/first --every 1 --for 50 --first 12000", "50 steps from there on"),
            ("gradmon detail runs/first --reset", "return to the settings of the script"),
            ("gradmon detail runs/first --status", "what is in force, and what was requested"),
        ),
        (
            argument("run", metavar="RUN", help="the run directory of a running training"),
            value("--every", "N", "monitor the steps that are divisible by N", type=positive),
            argument("--preset", choices=("minimal", "standard", "full"), help="measure this preset instead of the script's"),
            value("--for", "N", "for N steps (default: until further notice)", type=positive, dest="steps"),
            value("--first", "STEP", "from this step on (default: the next one)", type=step_number),
            flag("--reset", "return to the settings of the script"),
            flag("--status", "show what is in force, and what was requested; changes nothing"),
            flag("--wait", "wait until the change is in force"),
            value("--timeout", "SECONDS", "wait no longer than this (default: as long as it takes)", type=positive),
        ),
        "detail.run",
        """The training reads a change at most once a second, at the end of a step, and applies it to the next one. A change replaces the
    one before it and does not affect the training: its parameters end as the same bits. Ranks that exchange values change together, in
    a monitored step; with a large cadence that may take a while. A change of the cadence overrides every=, monitor_step_fn= and
    max_overhead= of the script. In a compiled model, activations and attention stay as in the script. Updates are measured in steps
    divisible by 10, as by the presets. A resumed run follows its script: request the change again.

    The exit code is 0 if the change was requested (with --wait: if it is or was in force), 1 if the wait failed, and 2 if nothing
    reads changes in that directory, or no change was given.""",
    ),
    Command(
        "width-sweep",
        "check over several widths whether every layer moves as much as it should",
        "Train a model at several widths for a few steps, and fit for each layer how its update grows with the width.",
        (
            ("gradmon width-sweep train.py:make_model --data train.py:batch", "does each layer move alike at all widths?"),
            ("gradmon width-sweep my_package.model:make --data my_package.data:batch", "from modules that can be imported"),
            (
                "gradmon width-sweep train.py:make_model --data train.py:batches --optimizer adam --lr 1e-3 --lr-exponent -1",
                "with a learning rate proportional to 1 / width",
            ),
            (
                "gradmon width-sweep train.py:make_model --data train.py:batches --expect standard --steps 1",
                "against the theory of one step",
            ),
            (
                'gradmon width-sweep train.py:make_model --data train.py:batches --expect "head=1,0.5" --expect "norm=none"',
                "against your own exponents",
            ),
        ),
        (
            argument("factory", metavar="MODULE:FUNCTION", help="makes a model of a width; MODULE may be a file"),
            value("--data", "MODULE:NAME", "a batch, a list of them, or a function of the seed", required=True),
            value("--widths", "N", "3 or more", type=int, nargs="+", default=[64, 128, 256, 512, 1024]),
            value("--seeds", "N", "how many", type=int, default=5),
            value("--steps", "N", "of training in each run", type=int, default=3),
            value("--optimizer", "NAME", "sgd, adam, adamw or MODULE:FUNCTION of model and width", default="adamw"),
            value("--lr", "X", "at the smallest width", type=float, default=1e-3),
            value("--lr-exponent", "C", "the learning rate is proportional to width^C", type=float, default=0),
            value("--loss", "MODULE:FUNCTION", "of model and batch (default: by the kind of the targets)"),
            value(
                "--expect",
                "WHAT",
                "stable (the default), standard, or REGEX=EXPONENT or REGEX=UPDATE,FROM_BELOW, none for what is not judged; repeatable",
                action="append",
                default=[],
            ),
            value("--tolerance", "X", "of exponents", type=float, default=0.25),
            value("--confidence", "P", "of intervals", type=float, default=0.95),
            JSON,
            output_file("a picture, such as .png"),
        ),
        "training.width_sweep_command",
        """make(width) returns a model, or a pair of a model and its optimizer. batch is a pair (inputs, targets), a list of such pairs, or
    a function of the seed that returns either. The exit code is 0 if all layers are shown to be as expected, 1 if one is not or the
    result is undecided, and 2 if the sweep fails.""",
    ),
)
COMMANDS = {command.name: command for command in _COMMANDS}
