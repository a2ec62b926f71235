"""How fast is each mechanism, how much memory does it take, and what bounds it? Always beside another, in one run.

    python bench.py                                          # one training step at the paper's size, float32 and bfloat16
    python bench.py --train= --eval=512,16384                # evaluation (a loss for every token, as eval_length.py does)
    python bench.py --train= --generate=512,8192             # one token with so many in the cache
    python bench.py --against=../nanoGPT/model.py --pos=rope # another model.py in the same turns
    python bench.py --profile --pos=accrot_qkv               # where the time of one step goes

Cases take turns, in both orders, so that a slow minute of the machine hits all alike; a time is the median over turns,
a ratio the median over turns of time / the first case's time in that turn, ± half the distance of the quartiles. A matrix
product takes its turn too: MFU is the rate of the arithmetic that the model needs over the product's rate. Arithmetic
is that of GPT.flops_per_token over half of the context, as causal attention needs; memory is what a step needs at its
peak above what was held before it (weights, moments). Cases share their weights, so all fit in the memory of one.
"""
import argparse
import gc
import importlib
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, fields

import torch

import model as own
from attention import Cache
from eval_length import check_outputs, integers, layout, write_whole
from positional import UsageError
from prepare_data import integer, number
from train import device_name, environment, make_optimizer

MECHANISMS = "rope,randrot_qkv,accrot_qk,accrot_qkv,accrot_qkv:hidden,alibi,fox"
SIZES = {"paper": dict(n_layer=16, n_head=8, n_embd=768, vocab_size=50257), "demo": dict(n_layer=4, n_head=2, n_embd=128, vocab_size=257)}


class Case:
    """A model under a name, and what one turn of it does."""
    def __init__(self, name, model, device, first=None):
        self.name, self.model = name, model.to(device)
        if first and type(model) is own.GPT:
            share(model, first.model)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.optimizer = make_optimizer(model, dict(weight_decay=0.1, lr=1e-4, beta2=0.95), device)
        if first:
            self.optimizer.state = first.optimizer.state

    def train(self, idx, targets, autocast):
        def turn():
            with autocast():
                loss = self.model(idx, targets)[1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.model.train()
        return turn

    def eval(self, idx, targets, autocast):
        def turn():
            with torch.inference_mode(), autocast():
                self.model.forward(idx, targets, reduction="none")
        self.model.eval()
        return turn

    def generate(self, idx, targets, autocast, tokens=8):
        """The cache grows by `tokens` a turn: little beside its length."""
        caches = [Cache(idx.size(1) + 64 * tokens) for _ in self.model.blocks]

        def turn(new=targets[:, -1:], times=tokens):
            with torch.inference_mode(), autocast():
                for _ in range(times):
                    self.model.forward(new, caches=caches)
        self.model.eval()
        turn(idx, 1)
        return turn


def share(model, first):
    """Make model use first's parameters wherever names and shapes agree."""
    mine = dict(model.named_parameters())
    for name, p in first.named_parameters():
        if name in mine and mine[name].shape == p.shape:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, p)


def build(args, device):
    """The cases that the command line names, the first being the one that the others are compared with."""
    size = SIZES[args.config] | {k: v for k, v in vars(args).items() if k.startswith("n_") and v}
    cases, first = [], None
    for name in args.pos.split(","):
        pos, _, angles = name.partition(":")
        config = own.GPTConfig(pos=pos, angles=angles or "token", block_size=512, dropout=args.dropout, **size)
        for label in [name] + [f"{name} compiled"] * args.compile:
            cases.append(Case(label, own.GPT(config), device, first))
            first = first or cases[0]
            if label != name:
                cases[-1].model.compile(fullgraph=True, dynamic=False)
    if args.against:
        GPT, GPTConfig = other(args.against)
        known = {field.name for field in fields(GPTConfig)}
        values = asdict(first.model.config) | dict(vocab_size=first.model.config.padded_vocab_size, bias=True)
        values["block_size"] = max([512, *args.train, *args.eval])
        model = GPT(GPTConfig(**{k: v for k, v in values.items() if k in known}))
        if hasattr(model, "lm_head") and not args.tied:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        cases.append(Case(args.against, model, device))
    return cases


def other(path):
    """GPT and GPTConfig of another nanoGPT-style model.py, whose own imports come from beside it."""
    if not os.path.isfile(path):
        raise UsageError(f"against={path}: no such file; give the path of a model.py with GPT and GPTConfig")
    names = ("model", "attention", "positional")
    ours = {name: sys.modules.pop(name) for name in names}
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        module = importlib.import_module(os.path.basename(path).removesuffix(".py"))
        return module.GPT, module.GPTConfig
    finally:
        sys.path.pop(0)
        sys.modules.update(ours)


# ---------------------------------------------------------------- measuring

def held(device, peak=False):
    """Bytes held now, or at most since the last call without `peak`; None where the system does not say."""
    if device.type == "cuda":
        if not peak:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    try:
        if not peak:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")                           # Linux: the peak starts again from what is held now
        with open("/proc/self/status") as file:
            return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM" if peak else "VmRSS"))
    except OSError:
        return None


def measure(turn, device):
    """(seconds, bytes above those held before or None) of one call."""
    before = held(device)
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
        turn()
        end.record()
        end.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
    else:
        began = time.perf_counter()
        turn()
        seconds = time.perf_counter() - began
    return seconds, before and held(device, peak=True) - before


def matmul(device, dtype):
    """A product at this device's best, and its operations."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return lambda: a @ b, 2 * n ** 3


def spread(values):
    """(median, half the distance of the quartiles)."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return statistics.median(values), (quartiles[2] - quartiles[0]) / 2


def compare(cases, kind, length, dtype, args, device):
    """One row a case: all of them take `repeats` turns, after turns that do not count."""
    batch = args.batch_size if kind == "train" else max(1, args.batch_size * 512 // length)
    batch = 1 if kind == "generate" else batch
    generator = torch.Generator(device).manual_seed(0)
    idx, targets = torch.randint(cases[0].model.config.vocab_size, (2, batch, length), device=device, generator=generator)

    def autocast():
        return torch.autocast(device.type, torch.bfloat16) if dtype == torch.bfloat16 else nullcontext()

    product, operations = matmul(device, dtype)
    turns = {case.name: getattr(case, kind)(idx, targets, autocast) for case in cases}
    turns["matmul"] = product
    if args.profile:
        return [print(profile(turn, name, device)) for name, turn in turns.items()][:0]
    for turn in [*turns.values()] * args.warmup:
        turn()
    times, memory = {name: [] for name in turns}, {name: [] for name in turns}
    for repeat in range(args.repeats):
        for name in list(turns)[::1 if repeat % 2 else -1]:
            seconds, peak = measure(turns[name], device)
            times[name].append(seconds)
            memory[name].append(peak or 0)
    rate, rows = operations / statistics.median(times["matmul"]), []
    tokens = 8 if kind == "generate" else batch * length
    for case in cases:
        seconds, error = spread(times[case.name])
        ratio, ratio_error = spread([a / b for a, b in zip(times[case.name], times[cases[0].name])])
        counts = case.model if hasattr(case.model, "flops_per_token") else cases[0].model
        flops = tokens * counts.flops_per_token(length / 2 if kind != "generate" else length) / (1 if kind == "train" else 3)
        rows.append({"kind": kind, "length": length, "batch": batch, "dtype": str(dtype).removeprefix("torch."),
                     "case": case.name, "ms": seconds * 1e3, "ms_error": error * 1e3, "ratio": ratio,
                     "ratio_error": ratio_error, "tokens_per_s": tokens / seconds, "mfu": flops / seconds / rate,
                     "matmul_flops_per_s": rate, "floor_ms": flops / rate * 1e3, "memory": max(memory[case.name]),
                     "parameters": case.parameters})
    return rows


def table(rows):
    lines = [["", "ms", "±", f"/ {rows[0]['case']}", "±", "tokens/s", "MFU", "memory", "parameters"]]
    for r in rows:
        lines.append([r["case"], f"{r['ms']:,.1f}", f"{r['ms_error'] / r['ms']:.1%}", f"{r['ratio']:.3f}", f"{r['ratio_error']:.3f}",
                      f"{r['tokens_per_s']:,.0f}", f"{r['mfu']:.0%}", f"{r['memory'] / 2 ** 30:.2f} GiB", f"{r['parameters']:,}"])
    head = {"train": "training step", "eval": "evaluation", "generate": "8 new tokens"}[rows[0]["kind"]]
    return (f"\n{head}, {rows[0]['batch']} x {rows[0]['length']:,} tokens, {rows[0]['dtype']}; matrix product "
            f"{rows[0]['matmul_flops_per_s'] / 1e9:,.0f} GFLOP/s\n" + layout(lines))


def profile(turn, name, device, rows=14):
    """The operations that take the most time of their own in one turn."""
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
    turn()
    with torch.profiler.profile(activities=kinds) as seen:
        turn()
    cost = {e.key: ((e.self_device_time_total if device.type == "cuda" else e.self_cpu_time_total) / 1e3, e.count)
            for e in seen.key_averages()}
    total = sum(ms for ms, _ in cost.values())
    top = sorted(cost.items(), key=lambda item: -item[1][0])[:rows]
    return f"\n{name}: {total:,.1f} ms\n" + layout([["operation", "ms", "share", "calls"]] + [
        [key[:70], f"{ms:,.1f}", f"{ms / total:.1%}", str(count)] for key, (ms, count) in top])


def main(argv=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    lengths = lambda text: integers(1)(text) if text else []
    add("--pos", default=MECHANISMS, help="mechanisms, the first to compare with; accrot's angles after a colon (%(default)s)")
    add("--config", choices=SIZES, default="paper", help="size of the model (paper)")
    for name in ("n_layer", "n_head", "n_embd"):
        add(f"--{name}", type=integer(1), help="another size than the config's")
    add("--dropout", type=number(0, 0.99), default=0.0, help="(0)")
    add("--train", type=lengths, default=[512], help="lengths of training steps (512; empty: none)")
    add("--eval", type=lengths, default=[], help="lengths to evaluate at, e.g. 512,16384")
    add("--generate", type=lengths, default=[], help="lengths of the cache to generate one token after another with")
    add("--batch_size", type=integer(1), default=2, help="sequences of a training step; evaluation: that many x 512 tokens, at least one (2)")
    add("--dtype", default="float32,bfloat16", help="float32, bfloat16 (autocast) or both (%(default)s)")
    add("--compile", action="store_true", help="also time each mechanism compiled (training only)")
    add("--against", help="path of another nanoGPT-style model.py to train in the same turns")
    add("--tied", action="store_true", help="leave its head tied to its embedding, if it is (default: untied, as here)")
    add("--repeats", type=integer(1), default=5, help="turns that count (5)")
    add("--warmup", type=integer(0), default=1, help="turns before, that do not (1)")
    add("--profile", action="store_true", help="say where the time of one turn goes instead")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda where there is one, else cpu")
    add("--json", help="write all numbers to this file")
    args = parser.parse_args(argv)
    args.plot = None
    try:
        check_outputs(args)
        dtypes = [{"float32": torch.float32, "bfloat16": torch.bfloat16}.get(d) for d in args.dtype.split(",")]
        if None in dtypes:
            raise UsageError(f"dtype={args.dtype}: use float32, bfloat16 or float32,bfloat16")
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
        cases, rows = build(args, device), []
        print(f"{device_name(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}")
        for kind in ("train", "eval", "generate"):
            for length in getattr(args, kind):
                for dtype in dtypes:
                    gc.collect()
                    new = compare(cases, kind, length, dtype, args, device)
                    rows += new
                    if new:
                        print(table(new), flush=True)
    except UsageError as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        write_whole(args.json, json.dumps({"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
