"""How well does a checkpoint predict at lengths it was never trained on?

    python eval_length.py out/*/ckpt.pt --plot=length.png --json=length.json     # evaluate, show, keep
    python eval_length.py length.json --plot=length.png                          # show again what was kept

The same target tokens are scored at every length: one stretch of held-out text is cut into windows of 512 tokens, of
1,024, of 2,048 ... so only the context differs. A ratio is perplexity at a length over perplexity at the training
length, on these tokens: 1 means that longer windows neither help nor hurt, above 1 that they hurt, and below 1 that
the added context helps (above all the early tokens of a training window, which had little). The late ratio counts only
targets in the second half of every training-length block: they had at least half a block of context at the shortest.
Long windows span many documents.
"""
import json, math, sys, time
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

from checks import Parser, UsageError, check_outputs, count, integer, integers, picture, program, read_json, real, write_json
from model import GPT, autocast_for, device_of
from positional import ConstantRotation
from prepare_data import TokenShards
from train import FREE_ON_RESUME

FORWARD_TOKENS = 16_384                 # short windows are scored so many tokens at a time
MULTIPLES = [2 ** k for k in range(8)]  # default lengths, in training lengths; default gaps are 0 and half of these


def apply_tricks(model, length, ntk=False, window=None, logn=False):
    """Set a trained model up for windows of `length` tokens, with what a user would try at evaluation time.
    ntk: RoPE's base times (length / block_size)^(d / (d - 2)), dynamic NTK scaling: the slowest plane turns over all of
    `length` as far as it did over block_size. window: a query sees itself and the window - 1 keys before it
    (with +conv these know of three tokens more). logn: queries with more than block_size keys have their logits scaled by
    ln(keys) / ln(block_size) (arXiv 2501.19399); with +nope in open layers only, as elsewhere a bias or a route holds far
    keys off."""
    block_size, d = model.config.block_size, model.config.head_dim
    layers = [block.attention for block in model.blocks]
    mixed = any(attention.position.open for attention in layers)
    for attention in layers:
        attention.window = window
        attention.position.logn_from = block_size if logn and attention.position.open == mixed else None
        if ntk:
            attention.position.steps.base = ConstantRotation.base * max(1.0, length / block_size) ** (d / (d - 2))


def check_tricks(model, path, args):
    config, rope = model.config, type(model.blocks[0].attention.position.steps) is ConstantRotation
    for trick, wrong, why in (
            ("ntk", not rope, f"rescales RoPE's frequencies, and {path} has pos={config.pos}"),
            ("ntk", config.head_dim <= 2, f"needs heads wider than 2, and {path} has {config.head_dim}"),
            ("logn", "logn" in config.pos.split("+"), f"{path} was trained with +logn already"),
            ("logn", config.block_size < 2, f"{path} has block_size=1, and ln 1 = 0"),
            ("logn", args.window, f"scales with the number of keys, which --window={args.window} holds")):
        if getattr(args, trick) and wrong:
            raise UsageError(f"{trick}: {why}; leave --{trick} out")


def token_losses(model, rows, sequence, device, autocast):
    """Loss in nats of every target of rows (B, L + 1) int64: (B, L) float64 on the CPU; inf where it is not finite."""
    rows = torch.from_numpy(rows).to(device)
    with torch.inference_mode(), autocast():
        losses = model(rows[:, :-1], rows[:, 1:], torch.as_tensor(sequence, device=device), reduction="none")[1]
    return losses.float().cpu().double().nan_to_num(math.inf, math.inf, math.inf).numpy()


def score_length(model, shards, length, n_tokens, device, autocast, bar):
    """Loss of the targets 1 ... n_tokens of the split, in windows of `length` inputs: (n_tokens,) float64, in order."""
    losses = []
    for windows in torch.arange(n_tokens // length).split(max(1, FORWARD_TOKENS // length)):
        rows = shards.rows((windows * length).tolist(), length + 1)
        losses.append(token_losses(model, rows, windows, device, autocast))
        bar.update(losses[-1].size)
    return np.concatenate(losses, axis=None)


def perplexity(losses):
    """exp(total loss / number of targets); never a mean of perplexities."""
    mean = losses.mean()
    return math.exp(mean) if mean < 700 else math.inf


def standard_error(values, least=2):
    """Of the mean of independent values; None for fewer than `least`, or where one is not finite."""
    values = np.asarray(values, float)
    if len(values) >= least and np.isfinite(values).all():
        return values.std(ddof=1).item() / math.sqrt(len(values))


def summarize(losses, lengths, block_size):
    """Rows of the report from losses {length: (N,) float64}: perplexities and ratios, of all targets and of late ones.
    The error of a ratio (d exp(x) = exp(x) dx) is of differences paired token by token. Neighbours are not independent,
    so one observation is all tokens of a longest window; with under 8 of these it is None."""
    base, longest, rows = losses[block_size], max(lengths), []
    late = np.arange(len(base)) % block_size >= block_size // 2
    for length in lengths:
        row = {"length": length, "windows": len(base) // length}
        for kind, keep in (("", np.ones_like(late)), ("late_", late)):
            here, there = perplexity(losses[length][keep]), perplexity(base[keep])
            ratio = here / there if math.isfinite(there) else math.inf
            with np.errstate(invalid="ignore"):  # inf - inf, where a model has diverged
                paired = np.where(keep, losses[length] - base, 0)
            error = standard_error(paired.reshape(-1, longest).sum(1) / keep.reshape(-1, longest).sum(1), least=8)
            row |= {f"{kind}targets": int(keep.sum()), f"{kind}loss": float(losses[length][keep].mean()),
                    f"{kind}perplexity": here, f"{kind}ratio": ratio,
                    f"{kind}ratio_error": None if error is None or ratio == math.inf else ratio * error}
        rows.append(row)
    return rows


def loss_by_position(losses, length):
    """Mean loss at positions 0 ... length - 1 of windows of `length`, all windows together, in bins of a quarter
    octave or as much more as 64 targets take (one bin if there are fewer): first positions, losses."""
    by_position, windows, first = losses.reshape(-1, length).mean(0), len(losses) // length, [0]
    for edge in np.geomspace(1, length, 4 * max(1, int(math.log2(length))) + 1).round().astype(int).tolist():
        if (edge - first[-1]) * windows >= 64:
            first.append(edge)
    first = first[:-1] or first  # the last edge is the end, or leaves too few behind it
    return {"length": length, "first_position": first,
            "loss": [float(part.mean()) for part in np.split(by_position, first[1:])]}


def recall_probe(model, shards, gaps, passages, device, autocast, bar, setup):
    """Does the model use text it saw long ago? A passage of block_size / 2 tokens, other text, the passage again.
    Returns one row a gap (in tokens): mean loss on the second copy, on the same tokens at the same place when the first
    copy was another passage, the gain, its standard error over passages. A window shorter than the gap cannot gain."""
    half, rows = max(1, model.config.block_size // 2), []
    for gap in gaps:
        setup(2 * half + gap)
        found = []
        for p in range(passages):  # spread over the split
            text = shards.read((len(shards) - gap - 2 * half - 1) * p // passages, 2 * half + gap)
            other, passage, filler = np.split(text, [half, 2 * half])
            pair = np.stack([np.concatenate((first, filler, passage)) for first in (passage, other)])
            # the copy's first token cannot be foreseen
            found.append(token_losses(model, pair, [p, p], device, autocast)[:, -max(1, half - 1):].mean(1))
            bar.update(pair.size)
        second, control = np.transpose(found)
        rows.append({"gap": gap, "loss": second.mean().item(), "control_loss": control.mean().item(),
                     "gain": (control - second).mean().item(), "gain_error": standard_error(control - second)})
    return rows


def held_out(data, checkpoint, path):
    """The val split of `data`, or of what the checkpoint was trained on. UsageError for tokens of another kind."""
    data = data or checkpoint["train"]["data"]
    shards = TokenShards(data, "val")
    for name in ("tokenizer", "vocab_size"):
        if shards.meta[name] != checkpoint["data"][name]:
            raise UsageError(f"data={data}: {name} is {shards.meta[name]}, {path} was trained with "
                             f"{checkpoint['data'][name]}")
    return shards


def plan(shards, block_size, lengths, n_tokens):
    """The lengths to score (block_size among them) and the number of targets, a multiple of each. Or UsageError."""
    available = len(shards) - 1
    lengths = sorted({block_size, *(lengths or [n for n in (block_size * k for k in MULTIPLES) if n <= available])})
    for length in lengths:
        if length > available:
            raise UsageError(f"lengths={length}: the val split has only {available} targets; use --lengths=... up to "
                             "that, or prepare more text (prepare_data.py --val_fraction)")
    multiple, wanted = math.lcm(*lengths), min(available, n_tokens or 8 * max(lengths))
    if multiple > wanted:
        raise UsageError(f"tokens={wanted}: the lengths {', '.join(map(str, lengths))} all divide only multiples of "
                         f"{multiple}; use lengths that divide the longest, and --tokens from {multiple}"
                         + (f" (the val split has {available})" if multiple > available else ""))
    return lengths, wanted // multiple * multiple


def evaluate(path, args):
    """Everything the report says of one checkpoint, as a dict that JSON can hold."""
    device = device_of(args.device)
    autocast, model = autocast_for(device, args.dtype), GPT.from_checkpoint(path, device)
    config, checkpoint = model.config, model.checkpoint
    tricks = {"ntk": args.ntk, "window": args.window, "logn": args.logn}
    label, setup = label_of(config, checkpoint, **tricks), partial(apply_tricks, model, **tricks)
    check_tricks(model, path, args)
    shards = held_out(args.data, checkpoint, path)
    lengths, n_tokens = plan(shards, config.block_size, args.lengths, args.tokens)
    most = len(shards) - max(2, config.block_size) - 1
    if args.gaps and (not args.recall or max(args.gaps) > most):
        raise UsageError(f"gaps={max(args.gaps)}: needs --recall=PASSAGES, and the val split has room for {most}")
    halves = {0, *(config.block_size * k // 2 for k in MULTIPLES)} if args.recall else ()
    gaps = args.gaps or sorted(n for n in halves if n <= most)
    work = n_tokens * len(lengths) + args.recall * sum(2 * (gap + config.block_size) for gap in gaps)
    losses, clock = {}, [time.perf_counter()]
    with tqdm(total=work, unit="token", unit_scale=True, disable=None, leave=False, desc=label) as bar:
        for length in lengths:
            setup(length)
            losses[length] = score_length(model, shards, length, n_tokens, device, autocast, bar)
            clock.append(time.perf_counter())
        recall = recall_probe(model, shards, gaps, args.recall, device, autocast, bar, setup)
    rows = summarize(losses, lengths, config.block_size)
    return {"label": label, "checkpoint": path, "pos": config.pos, "angles": config.angles,
            "value_route": config.value_route, "seed": config.seed, "block_size": config.block_size,
            "step": checkpoint["step"], "parameters": sum(p.numel() for p in model.parameters()),
            "train": checkpoint["train"], "protocol": protocol(n_tokens, lengths, config.block_size),
            "data": shards.meta["source"], "val_sha256": [shard["sha256"] for shard in shards.meta["shards"]["val"]],
            **tricks, "dtype": "bfloat16" if autocast.keywords["enabled"] else "float32", "device": device.type,
            "targets": n_tokens, "seconds": time.perf_counter() - clock[0],
            "lengths": [row | {"seconds": seconds} for row, seconds in zip(rows, np.diff(clock).tolist())],
            "by_position": loss_by_position(losses[max(lengths)], max(lengths)), "recall": recall}


def label_of(config, checkpoint, ntk=False, window=None, logn=False):
    together = checkpoint["train"]["cross_batch"]
    together = together if count(together) and together > 1 else None                         # it may be anybody's
    parts = [(config.pos, True), (config.angles, config.angles != "token"), ("own", config.value_route == "own"),
             (f"cross {together}", together), ("ntk", ntk), (f"window {window}", window), ("logn", logn)]
    return " ".join(word for word, said in parts if said)


def protocol(n_tokens, lengths, block_size):
    return (f"The first {n_tokens:,} targets of the val split, the same at every length, cut into windows of "
            f"{', '.join(map(str, lengths))} inputs without overlap. ratio = perplexity / perplexity at the training "
            f"length of {block_size}; below 1: the longer context helps. perplexity = exp(total loss / targets). late: "
            f"targets in the second half of every block of {block_size}. ratio_error: standard error of the paired "
            f"loss difference, one observation per window of {max(lengths)}, times the ratio; null under 8 of them. "
            "Any other null: not finite. Long windows span many documents. by_position: mean loss from each "
            f"first_position to the next in windows of {max(lengths)}. recall: loss on a passage of {block_size // 2} "
            "tokens repeated after `gap` others; control_loss without the first copy.")


def average(results):
    """Runs that differ only in their seed become one, its numbers the means; errors are then the standard errors of
    those means over the runs, None for a single run."""
    groups, merged = {}, []
    for r in results:
        same = {"cross_batch": 1} | r["train"] | {"init_from": bool(r["train"]["init_from"])}  # 1: older ones have none
        same |= dict.fromkeys({*FREE_ON_RESUME, "seed"})
        rows = [[row.get("length"), row.get("gap"), sorted(row)] for row in (*r["lengths"], *r["recall"])]
        key = json.dumps([r["label"], r["step"], r["targets"], r["data"], r.get("val_sha256"), r.get("dtype"), same,
                          rows, r["by_position"]["first_position"]], sort_keys=True)
        if r["seed"] in [other["seed"] for other in groups.setdefault(key, [])]:
            raise UsageError(f"average: {r['label']} with seed {r['seed']} is given twice ({r['checkpoint']})")
        groups[key].append(r)
    for runs in groups.values():
        means = {kind: [average_rows(rows) for rows in zip(*(r[kind] for r in runs))] for kind in ("lengths", "recall")}
        loss = np.mean([r["by_position"]["loss"] for r in runs], axis=0).tolist()
        merged.append(runs[0] | means | {"runs": len(runs), "by_position": runs[0]["by_position"] | {"loss": loss}})
    return merged


def average_rows(rows):
    found = {name: [row[name] for row in rows] for name in rows[0] if not name.endswith("_error")}
    errors = {f"{name}_error": standard_error(values) for name, values in found.items()}
    return {name: float(np.mean(values)) for name, values in found.items()} | errors


def row_names(results):
    """Labels; where two are the same, told apart by what differs."""
    names = [r["label"] for r in results]
    for more in ("block_size", "seed", "step", "parameters", "checkpoint", "dtype", "data"):
        values = {name: {r.get(more) for n, r in zip(names, results) if n == name} for name in names}
        names = [f"{n} {more} {r[more]}" if len(values[n]) > 1 else n for n, r in zip(names, results)]
    return names


def table(results, kind=""):
    """One row a result: ratios of all ("") or of late ("late_") targets at each multiple of the training length, then
    perplexity at the shortest and longest that all have, targets, parameters."""
    rows = [{row["length"] / r["block_size"]: row for row in r["lengths"]} for r in results]
    columns = sorted(set().union(*rows))
    common = max(set(columns).intersection(*rows))
    trained = {r["block_size"] for r in results}
    lines = [[f"1x = {trained.pop():,} tokens" if len(trained) == 1 else "", *(f"{x:.4g}x" for x in columns),
              "perplexity at 1x", f"at {common:.4g}x", "targets", "parameters", "runs"]]
    for name, r, at in zip(row_names(results), results, rows):
        lines.append([name, *(with_error(at.get(x), f"{kind}ratio") for x in columns),
                      *(with_error(at[x], f"{kind}perplexity") for x in (1, common)),
                      f"{at[1][f'{kind}targets']:,.0f}", f"{r['parameters']:,}", str(r.get("runs", 1))])
    return layout(lines)


def recall_table(results):
    """Gain in nats per token on the second copy of a passage: one row a result, one column a gap in tokens."""
    results = [r for r in results if r["recall"]]
    rows = [{row["gap"]: row for row in r["recall"]} for r in results]
    gaps = sorted(set().union(*rows))
    return layout([["gap", *(f"{gap:,.0f}" for gap in gaps)]] + [
        [name, *(with_error(at.get(gap), "gain") for gap in gaps)] for name, at in zip(row_names(results), rows)])


def with_error(row, name):
    if row is None:
        return "-"
    error = row.get(f"{name}_error")
    return f"{row[name]:.3f}" + ("" if error is None else f" ±{error:.3f}")


def layout(lines):
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join([first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:]))]).rstrip()
                     for first, *rest in lines)


def plot(results, path):
    """Ratio against length, loss against position, and recall where it was probed; the training length is marked.
    Models trained at several lengths are drawn against multiples of these."""
    recall, several = any(r["recall"] for r in results), len({r["block_size"] for r in results}) > 1
    trained = 1 if several else results[0]["block_size"]
    with picture(path, 1, 2 + recall, figsize=(6 * (2 + recall), 4.5)) as axes:
        for i, (name, r) in enumerate(zip(row_names(results), results)):
            style = {"label": name, "color": f"C{i % 10}"}
            unit, binned = r["block_size"] if several else 1, r["by_position"]
            for axis, rows, x, y in (axes[0], r["lengths"], "length", "ratio"), (axes[-1], r["recall"], "gap", "gain"):
                shown = [row for row in rows if math.isfinite(row[y])]
                if rows:
                    axis.errorbar([row[x] / unit for row in shown], [row[y] for row in shown], **style, marker="o",
                                  markersize=3, yerr=[row[f"{y}_error"] or 0 for row in shown])
            edges = [*binned["first_position"], binned["length"]]
            axes[1].plot([math.sqrt((a + 1) * b) / unit for a, b in zip(edges, edges[1:])], binned["loss"], **style)
        titles = [("window length", "perplexity / perplexity at the training length"),
                  ("position in the longest window", "loss (nats per token)"),
                  ("gap between the copies", "gain on the second copy (nats per token)")]
        axes[0].set_yscale("log")
        axes[0].yaxis.set_major_formatter("{x:g}")
        axes[0].yaxis.set_minor_formatter("{x:g}")
        for axis, (x, y) in zip(axes, titles):
            near_zero = {"linthresh": trained / 4} if x.startswith("gap") else {}  # a gap can be 0
            axis.set_xscale("symlog" if near_zero else "log", base=2, **near_zero)
            axis.xaxis.set_major_formatter("{x:,g}")
            axis.set(xlabel=f"{x} ({'training lengths' if several else 'tokens'})", ylabel=y)
            axis.axvline(trained, color="gray", linestyle=":", linewidth=1)
        axes[0].legend(fontsize=8)
        axes[0].set_title("dotted: training length", fontsize=8, loc="right")


def row_of(*names):
    """Whether a row of a results file has only numbers, these among them."""
    return lambda row: (isinstance(row, dict) and row.keys() >= set(names) and all(map(real, row.values()))
                        and all(value is None or value >= 0 for name, value in row.items() if name.endswith("_error")))


# What a results file must say to be shown or averaged: a list of such results.
RESULTS = [{"label": str, "checkpoint": str, "data": str, "seed": count, "step": count, "parameters": count,
            "targets": count, "block_size": lambda value: count(value) and value > 0, "train": {"init_from": str},
            "by_position": {"length": count, "first_position": [count], "loss": [real]},
            "recall": [row_of("gap", "gain", "gain_error")],
            "lengths": [row_of("length", "ratio", "ratio_error", "perplexity", "targets",
                               "late_ratio", "late_perplexity", "late_targets")]}]


def read_results(path):
    try:
        results = read_json(path, RESULTS)
        for r in results:
            if r["block_size"] not in [row["length"] for row in r["lengths"]]:
                raise ValueError(f"no row for the training length of {r['block_size']}")
            if len(r["by_position"]["first_position"]) != len(r["by_position"]["loss"]):
                raise ValueError("by_position has more positions than losses, or fewer")
            for row in (*r["lengths"], *r["recall"], r["by_position"]):  # null: diverged (but for errors: too few)
                row.update({key: math.inf for key, value in row.items() if value is None and not key.endswith("_error")})
            r["by_position"]["loss"] = [math.inf if loss is None else loss for loss in r["by_position"]["loss"]]
        return results
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a results file of eval_length.py ({error})") from None


@program
def main(argv=None):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="CKPT", help="checkpoints of train.py, or .json files of earlier results")
    add("--lengths", type=integers(1), help="e.g. 512,1024,2048 (default: the training length times 1, 2, 4 ... 128)")
    add("--tokens", type=integer(1), help="targets to score at every length (default: 8 longest windows, or all)")
    add("--data", help="directory of prepare_data.py (default: the one the checkpoint was trained on)")
    add("--json", help="write all results to this file")
    add("--plot", help="write a picture to this file, .png .svg or .pdf (needs matplotlib)")
    add("--ntk", action="store_true", help="rescale RoPE's base to each length (rope only)")
    add("--window", type=integer(1), help="a query sees only itself and the WINDOW - 1 keys before it")
    add("--logn", action="store_true", help="scale the logits of queries beyond the training length by ln n")
    add("--recall", type=integer(0), default=0, metavar="PASSAGES", help="also probe recall, with so many passages "
        "(default 0: no probe)")
    add("--gaps", type=integers(0), help="tokens between the copies (default: 0, then 0.5, 1, 2 ... 64 training lengths)")
    add("--average", action="store_true", help="show runs that differ only in their seed as one: mean ± standard error")
    add("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto", help="auto: cuda, else mps, else cpu")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="bfloat16: autocast (auto: on CUDA only)")
    args = parser.parse_args(argv)
    check_outputs(args)
    if all(path.endswith(".json") for path in args.inputs):
        for name in ("lengths", "tokens", "data", "ntk", "window", "logn", "recall", "gaps"):
            if getattr(args, name):
                raise UsageError(f"{name}: is for checkpoints, and results are given alone; leave --{name} out")
    results = []
    for path in args.inputs:
        results += read_results(path) if path.endswith(".json") else [evaluate(path, args)]
        if args.json:
            write_json(args.json, results)
    results = average(results) if args.average else results
    print("\nperplexity ratio, all targets (below 1: the longer context helps)\n" + table(results))
    print("\nperplexity ratio, late targets\n" + table(results, "late_"))
    if any(r["recall"] for r in results):
        print("\nrecall: gain on the second copy of a passage, nats per token\n" + recall_table(results))
    if args.plot:
        plot(results, args.plot)
        print(f"\npicture: {args.plot}")


if __name__ == "__main__":
    sys.exit(main())
