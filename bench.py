"""How fast is each mechanism, how much memory does it take, what bounds it? Always beside rope, in one run.

    python bench.py                                            # a training step at the paper's size, in both types
    python bench.py --train= --eval=512,16384                  # a loss for every token, as eval_length.py wants it
    python bench.py --train= --generate=512,8192               # 8 tokens one after another, so many being cached
    python bench.py --against=../nanoGPT/model.py --pos=rope   # another model.py in the same turns

Cases take turns, in one order and the other, so that a slow minute hits all alike. A time is the median over turns, a
ratio that of time / the first case's time in the same turn; ± is half the distance between quartiles. A large matrix
product takes turns too: MFU is the arithmetic that the model needs (flops_per_token of half the context, attention being
causal) over what the product does in that time. Memory is a turn's peak above what was held before: not weights, not
moments. Cases share their weights, so that all fit.
"""
import importlib.machinery, importlib.util, os, statistics, sys, time
from dataclasses import asdict, fields
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import model as own
from attention import Cache
from checks import Parser, UsageError, check_outputs, integer, integers, picture, program, write_json
from eval_length import layout
from train import device_name, make_optimizer

MECHANISMS = "rope,randrot_qkv,accrot_qk,accrot_qkv,accrot_qkv:hidden,alibi,fox"
NEW = 8  # tokens that a turn of --generate makes: the cache grows little
PRODUCT = 2048  # rows of the matrix product on CPU; on CUDA four times as many


class Case:
    """A model under a name. Each method is what one turn does."""
    def __init__(self, name, model, device, first=None):
        self.name, self.model = name, model.to(device)
        first, ours = first or self, model.state_dict()  # the first shares with itself
        shared = {key: p for key, p in first.model.named_parameters() if key in ours and ours[key].shape == p.shape}
        model.load_state_dict(shared, strict=False, assign=True)  # the very same weights in place of our own
        self.optimizer = make_optimizer(model, dict(weight_decay=0.1, lr=1e-4, beta2=0.95), device)
        self.optimizer.state = first.optimizer.state  # moments are kept by weight: shared as those are

    def train(self, idx, targets):
        self.model.train()
        self.model(idx, targets)[1].backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.inference_mode()
    def eval(self, idx, targets):
        self.model.eval().forward(idx, targets, reduction="none")

    @torch.inference_mode()
    def generate(self, idx, targets):
        for _ in range(NEW):
            self.model.head(self.model.hidden(targets[:, :1], caches=self.caches)[:, -1])


def build(args, device):
    """The cases that the command line names; the others are compared with the first."""
    cases = []
    for name in args.pos.split(","):
        pos, _, angles = name.partition(":")
        config = own.GPTConfig(pos=pos, angles=angles or "token", dropout=0.0, n_layer=args.n_layer, n_head=args.n_head,
                               n_embd=args.n_embd, vocab_size=args.vocab_size)
        cases.append(Case(name, own.GPT(config), device, *cases[:1]))
        if args.compile:
            cases.append(Case(f"{name} compiled", own.GPT(config), device, cases[0]))
            cases[-1].model.compile(fullgraph=True, dynamic=False)
    if args.against:
        theirs, their_config = other(args.against)
        values = asdict(cases[0].model.config) | dict(vocab_size=config.padded_vocab_size, bias=True,
                                                      block_size=max([512, *args.train]))
        model = theirs(their_config(**{f.name: values[f.name] for f in fields(their_config) if f.name in values}))
        if hasattr(model, "lm_head"):  # nanoGPT ties it to the embedding: untied, as here, to be of one size
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        cases.append(Case("/".join(os.path.abspath(args.against).split("/")[-2:]), model, device))
    return cases


def other(path):
    """Another nanoGPT-style model.py, with GPT and GPTConfig, whose own imports come from beside it."""
    if not os.path.isfile(path):
        raise UsageError(f"against={path}: no such file; give the path of a model.py with GPT and GPTConfig")
    here = os.path.dirname(os.path.abspath(__file__))
    ours = {name: module for name, module in sys.modules.items()
            if os.path.dirname(getattr(module, "__file__", None) or "") == here and name != "__main__"}
    for name in ours:
        del sys.modules[name]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        loader = importlib.machinery.SourceFileLoader("against", path)
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader("against", loader))
        sys.modules["against"] = module  # a dataclass looks itself up
        loader.exec_module(module)
        return module.GPT, module.GPTConfig
    except Exception as error:  # whatever a file of somebody's can raise
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"against={path}: not a model.py with GPT and GPTConfig ({why})") from None
    finally:
        sys.path.pop(0)
        sys.modules.update(ours)


def held(device, peak=False):
    """Bytes held now, or with `peak` at most since the last call without; 0 where the system does not say."""
    if device.type == "cuda":
        if not peak:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    try:
        if not peak:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the record begins anew
        return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:" if peak else "VmRSS:")[1].split()[0])
    except OSError:
        return 0


def measure(turn, device, clock):
    """(seconds, bytes above those held before) of one call."""
    before, began = held(device), clock()
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
    turn()
    if device.type == "cuda":
        end.record()
        end.synchronize()
    seconds = begin.elapsed_time(end) / 1e3 if device.type == "cuda" else clock() - began
    return seconds, held(device, peak=True) - before


def spread(values):
    """(median, half the distance between the quartiles)."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return statistics.median(values), (quartiles[2] - quartiles[0]) / 2


def compare(cases, kind, length, dtype, args, device):
    """Show and return one row a case: each takes args.repeats turns, after args.warmup that do not count. With --profile,
    show where each turn's time goes and return none."""
    cases = [case for case in cases if kind == "train" or not case.name.endswith(" compiled")]  # these run eagerly
    first, config = cases[0].model, cases[0].model.config
    batch = {"train": args.batch_size, "eval": max(1, args.batch_size * 512 // length), "generate": 1}[kind]
    idx, targets = torch.randint(config.vocab_size, (2, batch, length)).to(device)
    autocast = own.autocast_for(device, dtype)()
    turns = {case.name: autocast(partial(getattr(case, kind), idx, targets)) for case in cases}
    if kind == "generate":
        for case in cases:
            case.caches = [Cache(length + (args.warmup + args.repeats + 2) * NEW) for _ in case.model.blocks]
            with torch.inference_mode(), autocast:
                case.model.eval().hidden(idx, caches=case.caches)
    if kind == "eval":  # attention's kernel alone, in all layers together
        q = torch.randn(batch, config.n_head, length, config.head_dim, device=device, dtype=getattr(torch, dtype))
        turns["attention alone"] = lambda: [scaled_dot_product_attention(q, q, q, is_causal=True) for _ in first.blocks]
    n = PRODUCT * (4 if device.type == "cuda" else 1)
    a = torch.randn(n, n, device=device, dtype=getattr(torch, dtype))
    turns["product"] = lambda: a @ a
    if args.profile:
        for name, turn in turns.items():
            print(profile(turn, name, device), flush=True)
        return []
    for turn in [*turns.values()] * args.warmup:
        turn()
    clock = time.process_time if args.cpu_time else time.perf_counter
    seen = {name: [] for name in turns}
    for repeat in range(args.repeats):
        for name in [*turns][::1 if repeat % 2 else -1]:
            seen[name].append(measure(turns[name], device, clock))
    times = {name: [seconds for seconds, _ in pairs] for name, pairs in seen.items()}
    rate = 2 * n ** 3 / statistics.median(times.pop("product"))
    tokens, context = (NEW, length) if kind == "generate" else (batch * length, length / 2)
    flops = {c.name: (c.model if type(c.model) is own.GPT else first).flops_per_token(context) for c in cases}
    flops["attention alone"] = first.flops_per_token(context) - first.flops_per_token(0)
    sizes = {case.name: sum(p.numel() for p in case.model.parameters()) for case in cases} | {"attention alone": 0}
    rows = []
    for name, values in times.items():
        (seconds, error), (ratio, off) = spread(values), spread([a / b for a, b in zip(values, times[cases[0].name])])
        need = tokens * flops[name] / (1 if kind == "train" else 3)  # 6 per weight are 2 forward, 4 backward
        rows.append({"kind": kind, "length": length, "batch": batch, "dtype": dtype, "case": name,
                     "parameters": sizes[name], "ms": seconds * 1e3, "ms_error": error * 1e3, "ratio": ratio,
                     "ratio_error": off, "tokens_per_s": tokens / seconds, "memory": max(m for _, m in seen[name]),
                     "mfu": need / seconds / rate, "floor_ms": need / rate * 1e3, "product_flops_per_s": rate})
    print(table(rows), flush=True)
    return rows


def table(rows):
    head = {"train": "training step", "eval": "evaluation", "generate": f"{NEW} new tokens"}[rows[0]["kind"]]
    lines = [["", "ms", "±", f"over {rows[0]['case']}", "±", "tokens/s", "MFU", "memory", "parameters"]] + [
        [r["case"], f"{r['ms']:,.1f}", f"{r['ms_error']:,.1f}", f"{r['ratio']:.3f}", f"{r['ratio_error']:.3f}",
         f"{r['tokens_per_s']:,.0f}", f"{r['mfu']:.0%}", f"{r['memory'] / 2 ** 30:.2f} GiB", f"{r['parameters']:,}"]
        for r in rows]
    return (f"\n{head}, {rows[0]['batch']} x {rows[0]['length']:,} tokens, {rows[0]['dtype']}; matrix product "
            f"{rows[0]['product_flops_per_s'] / 1e9:,.0f} GFLOP/s\n" + layout(lines))


def profile(turn, name, device):
    """The 16 operations that take the most time of their own in one turn."""
    turn()
    with torch.profiler.profile() as seen:  # whatever the machine can record
        turn()
    clock = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    cost = sorted([(getattr(e, clock) / 1e3, e.key[:70], e.count) for e in seen.key_averages()], reverse=True)
    total = sum(ms for ms, *_ in cost)
    return f"\n{name}: {total:,.1f} ms\n" + layout([["operation", "ms", "share", "calls"]] + [
        [key, f"{ms:,.1f}", f"{ms / total:.1%}", str(count)] for ms, key, count in cost[:16]])


def scaling(rows, path):
    """Fit the time of one window of T tokens by a T + b T^2 (least squares of relative errors), compare b with that of
    attention's kernel alone, and draw all."""
    points, fits = {}, {}
    for name in dict.fromkeys(r["case"] for r in rows):
        T, t = np.array([(r["length"], r["ms"] * 1e3 / r["batch"]) for r in rows if r["case"] == name]).T
        points[name] = T, t / T
        fits[name] = np.linalg.lstsq(np.stack((T, T ** 2), 1) / t[:, None], np.ones_like(t), rcond=None)[0]
    lines = [["", "a (us/token)", "b (ns/token^2)", "b over attention alone"]]
    with picture(path, 1, 1, figsize=(6, 4)) as axis:
        for name, (a, b) in fits.items():
            T, each = points[name]
            lines.append([name, f"{a:.3f}", f"{b * 1e3:.4f}", f"{b / fits['attention alone'][1]:.3f}"])
            line, = axis.loglog(T, each, "o", markersize=3)
            axis.loglog(T, a + b * T, color=line.get_color(), linewidth=1, label=name)
        axis.set(xlabel="window length T (tokens)", ylabel="microseconds per token", title="lines: a + b T")
        axis.legend(fontsize=8)
    return "\ntime = a T + b T^2\n" + layout(lines)


@program
def main(argv=None):
    parser = Parser(__doc__)
    add = parser.add_argument

    def lengths(text):
        return integers(1)(text) if text else []
    add("--pos", default=MECHANISMS, help="mechanisms; accrot's angles after a colon (%(default)s)")
    for name in ("n_layer", "n_head", "n_embd", "vocab_size"):
        add(f"--{name}", type=integer(1), default=getattr(own.GPTConfig, name), help="(%(default)s)")
    add("--train", type=lengths, default=[512], help="lengths of training steps (512; empty: none)")
    add("--eval", type=lengths, default=[], help="lengths to evaluate at, e.g. 512,16384")
    add("--generate", type=lengths, default=[], help="tokens in the cache when generating")
    add("--batch_size", type=integer(1), default=2, help="sequences to train; 512 times as many tokens to evaluate (2)")
    add("--dtype", default="float32,bfloat16", help="float32, bfloat16 (autocast), or both (%(default)s)")
    add("--compile", action="store_true", help="train each mechanism compiled too")
    add("--against", help="path of another nanoGPT-style model.py to train in the same turns")
    add("--repeats", type=integer(1), default=5, help="turns that count (5)")
    add("--warmup", type=integer(0), default=1, help="turns before, that do not (1)")
    add("--profile", action="store_true", help="say where the time of one turn goes instead")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(auto)")
    add("--threads", type=integer(1, 4096), help="of the CPU (default: one a core)")
    add("--cpu_time", action="store_true", help="seconds that the CPU gave us, for shared ones; with --threads=1")
    add("--json", help="write all numbers to this file")
    add("--plot", help="fit and draw time against the lengths of --eval (needs matplotlib)")
    args = parser.parse_args(argv)
    args.inputs = [args.against] * bool(args.against)
    check_outputs(args)
    if not set(args.dtype.split(",")) <= {"float32", "bfloat16"}:
        raise UsageError(f"dtype={args.dtype}: use float32, bfloat16 or float32,bfloat16")
    if args.against and (args.eval or args.generate):
        raise UsageError(f"against={args.against}: is timed in training only; leave --eval and --generate out")
    if args.plot and (len(set(args.eval)) < 3 or "," in args.dtype):
        raise UsageError(f"plot={args.plot}: needs --eval with three lengths or more, and one --dtype")
    if not args.train + args.eval + args.generate:
        raise UsageError("train=: then give lengths to --eval or --generate")
    device = own.device_of("cpu" if args.device == "auto" and not torch.cuda.is_available() else args.device)
    if args.compile:
        own.check_compiler(device)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    cases, rows = build(args, device), []
    where = f"{device_name(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(where + ", seconds of CPU" * args.cpu_time)
    for kind in ("train", "eval", "generate"):
        for length, dtype in product(getattr(args, kind), args.dtype.split(",")):
            rows += compare(cases, kind, length, dtype, args, device)
    if args.json:
        kept = {name: value for name, value in vars(args).items() if name not in ("json", "plot", "inputs")}
        write_json(args.json, {"where": where, "rows": rows, "arguments": kept})
    if args.plot:
        print(scaling([r for r in rows if r["kind"] == "eval"], args.plot))


if __name__ == "__main__":
    sys.exit(main())
