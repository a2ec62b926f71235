"""How all programs read numbers, judge what a file says, write files whole, refuse, and end. No PyTorch here, so that
prepare_data.py and its workers start at once."""
import argparse, functools, json, math, os, re, reprlib, signal, sys, threading
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager


class UsageError(ValueError):
    """Settings or a request that cannot be met. One line, as in all three: what was given, what is legal, what to type."""
class DataError(ValueError):
    """Text, or prepared data, that cannot be used."""
class CheckpointError(ValueError):
    """A checkpoint that cannot be used."""


# Bare RuntimeErrors of PyTorch: memory ran out, on whatever device, or would; another rank has died, or cannot be reached;
# logits to sample from are not finite.
BREAKDOWN = re.compile("(allocate|enough|out of) memory|calculation overflowed|(closed|reset) by peer|Broken pipe|"
                       "remote process exited|failed to listen|probability tensor")


class Parser(argparse.ArgumentParser):
    """Of a command line. What it cannot read is refused in one line, as all else is."""
    def __init__(self, about, **options):
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                         **options)

    def error(self, message):
        raise UsageError(f"{message}; see --help")


def program(main):
    """Decorator of a main(argv). It returns main's status, or says in one line why not: 2 for what cannot be used (a flag,
    data, a file, a disk), 1 for a run that broke down, 130 if interrupted. All else is a mistake of ours: a traceback."""
    @functools.wraps(main)
    def run(argv=None):
        for stream in (sys.stdout, sys.stderr):           # what a terminal cannot show must not end an hour's run
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            for word in sys.argv[1:] if argv is None else argv:
                if re.fullmatch("--[^=]+=--", word):      # argparse would make it an empty list
                    raise UsageError(f"{word}: give another value")
            try:
                return main(argv) or 0
            finally:
                flush()                                   # here, as Python itself would do it too late to say why not
        except KeyboardInterrupt:
            status, why = 130, "interrupted"
        except BrokenPipeError:                           # who reads our output, such as head, has seen enough
            return 141
        except (UsageError, DataError, CheckpointError, OSError, BrokenExecutor) as error:
            status, why = 2, error
        except (FloatingPointError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not BREAKDOWN.search(str(error)):
                raise
            status, why = 1, error
        said = str(why) or type(why).__name__
        print(f"{os.path.basename(main.__code__.co_filename)}: error:", *said.split(), file=sys.stderr)
        return status
    return run


def flush():
    """Write out what was printed. What cannot be written is given up, so that the error is raised once only."""
    try:
        if sys.stdout:                                    # None if it was closed from the start
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


@contextmanager
def whole(path, mode="w"):
    """A file to write that gets its name `path` when all of it is on the disk. If that fails nothing is left of it."""
    unfinished = f"{path}.tmp"
    try:
        with open(unfinished, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        if os.path.exists(unfinished):
            os.remove(unfinished)
        fault = error.__context__ if isinstance(error, RuntimeError) else error  # torch.save wraps a full disk's so
        if isinstance(fault, OSError) and fault.errno:
            raise OSError(fault.errno, fault.strerror, str(path)) from None
        raise


@contextmanager
def picture(path, rows, columns, **options):
    """Axes to draw on; what is drawn is then written to `path`, whole. UsageError without matplotlib."""
    try:
        from matplotlib import figure
    except ImportError:
        raise UsageError(f"plot={path}: needs matplotlib; pip install matplotlib, or leave --plot out") from None
    drawing = figure.Figure(layout="constrained", **options)
    axes = drawing.subplots(rows, columns)
    for axis in drawing.axes:
        axis.grid(alpha=0.2)
    yield axes
    for text in [text for axis in drawing.axes if axis.get_legend() for text in axis.get_legend().get_texts()]:
        text.set_parse_math(False)                        # a name may have a dollar
    with whole(path, "wb") as file:
        drawing.savefig(file, dpi=110, format=path[-3:])


def check_outputs(args):
    """An hour's result must not fail for want of a directory, nor replace what it was made from."""
    for name, kinds in (("json", (".json",)), ("plot", (".png", ".svg", ".pdf"))):
        if path := getattr(args, name):
            if not os.path.isdir(folder := os.path.dirname(path) or "."):
                raise UsageError(f"{name}={path}: there is no directory {folder}; make it first")
            if (not path.endswith(kinds) or path.endswith("meta.json") or os.path.isdir(path)
                    or os.path.realpath(path) in map(os.path.realpath, args.inputs)):
                raise UsageError(f"{name}={path}: name a file that ends in {' or '.join(kinds)} and is not read from")
            try:
                with open(f"{path}.tmp", "w"):
                    os.remove(f"{path}.tmp")
            except OSError as error:
                raise UsageError(f"{name}={path}: cannot be written ({error.strerror}); choose another place") from None


def number(low, high=math.inf, kind=float):
    """argparse type: a finite number in [low, high]."""
    def parse(text):
        try:
            value = int(text) if kind is int and text.isdigit() else float(text)
        except ValueError:
            value = math.inf
        if low <= value <= high and value < math.inf and kind(value) == value:
            return kind(value)
        legal = f"a {'whole ' * (kind is int)}number from {low} to {high}"
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not {legal}")
    return parse


def integer(low, high=2 ** 53):
    """argparse type: a whole number in [low, high], written 512 or 1e8."""
    return number(low, high, int)


def integers(low):
    """argparse type: 'a,b,c', each a whole number from `low`."""
    return lambda text: [integer(low)(part) for part in text.split(",")]


def switch(text):
    """argparse type: true, 1, yes or false, 0, no."""
    if text.lower() not in ("true", "1", "yes", "false", "0", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of true, 1, yes, false, 0, no")
    return text.lower() in ("true", "1", "yes")


def count(value):
    """Whether a file's value is a number of things."""
    return type(value) is int and 0 <= value <= 2 ** 53


def real(value):
    """Whether a file's value is a number, or null for one that is not finite."""
    return value is None or type(value) is float or count(value)


def misfit(value, shape, name=""):
    """Where `value`, read from a file that anybody may have written, is not of `shape`, and what stands there; else "".
    A shape is a type, a test, a list with the shape of each item, or a dict with the shapes of the keys it must have."""
    found = []
    if isinstance(shape, dict) and isinstance(value, dict):
        missing = [f"{name} has no {key}".strip() for key in shape if key not in value]
        found = missing or [misfit(value[key], part, f"{name}/{key}".strip("/")) for key, part in shape.items()]
    elif isinstance(shape, list) and isinstance(value, list):
        found = [misfit(item, shape[0], f"{name}/{i}".strip("/")) for i, item in enumerate(value)]
    elif isinstance(shape, (dict, list)) or not (isinstance(value, shape) if isinstance(shape, type) else shape(value)):
        found = [f"{name or 'all of it'} is {reprlib.repr(value)}"]
    return next(filter(None, found), "")


def read_json(path, shape):
    """What a JSON file says, if it is of `shape`; ValueError or OSError if not."""
    with open(path) as file:
        try:
            value = json.load(file)
        except RecursionError:
            raise ValueError("nested too deeply") from None
    if wrong := misfit(value, shape) or not value and "nothing is in it":
        raise ValueError(wrong)
    return value


def write_json(path, value, indent=1):
    """`value` as JSON, written whole, with null for every number that is not finite: JSON has no inf."""
    value = json.loads(json.dumps(value), parse_constant=lambda name: None)
    with whole(path) as file:
        json.dump(value, file, indent=indent, allow_nan=False)
