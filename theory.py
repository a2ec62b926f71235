"""Why accumulated steps extrapolate, and where that ends: each claim as a formula, a simulation and a measurement.

    python theory.py                                              # tables, and the picture theory.png
    python theory.py --ckpt out/demo-*/ckpt.pt --json=theory.json   # the same quantities in trained models
    python theory.py theory.json                                  # show again what was kept

The argument. (1) Random steps wash out a route: its expectation shrinks by a factor a step, whatever the length of the
text. (2) A washed-out score is small, so far keys are alike. (3) But many alike keys add up: the softmax mass on M far
tokens tends to 1, and only a bias, a window or growing logits hold it. (4) Then it matters what the far values add up
to: without a route their common part arrives whole, with one it partly cancels. (5) All of it on a checkpoint.
"""
import math, sys

import numpy as np
import torch

from checks import (Parser, UsageError, check_outputs, count, integer, integers, misfit, picture, program, read_json, real,
                    write_json)
from eval_length import MULTIPLES, held_out, label_of, layout, read_results, row_names, standard_error
from model import GPT, device_of

HEAD_DIM, NEAR, LAMBDA, EPS = 64, 512, 4.0, 0.1  # coordinates; near tokens; half the logit range, nats; "mixed"
SLOPE, WINDOW = 1 / 512, 1024                    # of part 3: nats per token of distance; tokens


def frequencies(head_dim):
    """w_p = 10000^(-2p/head_dim), radians, (head_dim/2,): RoPE's steps, and the half-widths of randrot's."""
    return 10000.0 ** (-2 * np.arange(head_dim // 2) / head_dim)


def plane_factor(w):
    """c = E[e^(i step)] = sin(w)/w, step ~ Uniform(-w, w) radians. Steps are independent: E[P over n steps] = c^n.
    So too for dense SO(d) steps that turn the planes of a Haar-random basis by such angles: E[M] = I E[trace M] / d."""
    return np.sinc(np.asarray(w) / np.pi)


def reflection_factor(head_dim):
    """E[I - 2 u u^T] = (1 - 2/d) I for u uniform on the sphere of R^d."""
    return 1 - 2 / head_dim


def mixing_window(factor, eps=EPS):
    """Steps n until E[P] = factor^n falls to eps: ln(1/eps) / |ln(factor)|. The length of the text does not enter."""
    with np.errstate(divide="ignore"):
        return math.log(1 / eps) / np.abs(np.log(factor))


def expected_score(distance, factors):
    """E<q, P q> over `distance` steps for a unit q spread evenly over the planes; a factor may be complex (RoPE)."""
    return np.real(np.asarray(factors) ** np.asarray(distance)[..., None]).mean(-1)


def simulate_phases(w, steps, routes, rng):
    """Phases of every plane after 1, 2 ... `steps` steps ~ Uniform(-w_p, w_p), radians: one (routes, steps) a plane."""
    return (rng.uniform(-half_width, half_width, (routes, steps)).cumsum(1) for half_width in w)


def hoeffding_bound(t, weights):
    """Pr(sum_b r_b cos(theta_b) >= t) <= exp(-t^2 / (2 sum r_b^2)): independent uniform phases, r_b = |q_b| |k_b|."""
    return np.exp(-np.square(t) / (2 * np.square(weights).sum()))


def phase_bound(t, weights):
    """The same tail with twice the exponent: E[e^(s cos theta)] = I_0(s) <= e^(s^2/4), where Hoeffding knows |cos| <= 1
    only and has e^(s^2/2). Equal weights 2/d give exp(-d t^2 / 2), which also bounds <q, u> for u uniform on the sphere
    (Ball, "An elementary introduction to modern convex geometry", 1997, lemma 2.2): mixing equals a random rotation."""
    return np.exp(-np.square(t) / np.square(weights).sum())


def simulate_scores(head_dim, draws, rng):
    """Far scores <q, P k> of unit q and k, (draws,) each: P drawn by Haar measure, or planes of equal weight mixed."""
    first, r = rng.standard_normal(draws), 2 / head_dim
    return {"Haar": first / np.sqrt(first ** 2 + rng.chisquare(head_dim - 1, draws)),
            "mixed planes": sum(r * np.cos(rng.uniform(-np.pi, np.pi, draws)) for _ in range(head_dim // 2))}


def far_mass(near, far):
    """Softmax mass on the logits `far` (..., M) beside `near` (..., K), nats."""
    top = np.maximum(near.max(-1), far.max(-1))[..., None]
    near, far = np.exp(near - top).sum(-1), np.exp(far - top).sum(-1)
    return far / (near + far)


def far_mass_bound(near, far, lam):
    """rho >= M / (M + K e^(2 lambda)): K near and M far keys whose logits, bias included, span at most 2 lambda nats.
    Equality when every near key is at +lambda and every far one at -lambda: the most that attention can do."""
    return far / (far + near * np.exp(2 * np.asarray(lam, float)))


def biased_far_mass(near, far, lead, slope):
    """Far mass when near keys lead by `lead` nats and a bias takes `slope` nats per token of distance. The far weights
    are a geometric series, so it converges. lead = -2 lambda is the most that contents within 2 lambda can reach.
    Weights add up to e^lead (1 - e^(-s K)) near and e^(-s K) (1 - e^(-s M)) far, both over 1 - e^-s, s the slope."""
    return 1 / (1 - np.exp(lead) * np.expm1(slope * near) / np.expm1(-slope * far))


def logn_lambda(lam, near, far):
    """lambda after logits are multiplied by ln(K + M) / ln(K). The bound is then about M / (M + K n^(2 lambda / ln K)):
    it falls with M only if near keys lead by 2 lambda > ln K nats at the training length, else it still tends to 1."""
    return lam * np.log(near + far) / math.log(near)


def background_power(far, factor):
    """E|P_1 + ... + P_M|^2 in one plane, independent steps with real c = E[e^(i step)]: the sum of c^|j-k| over pairs,
    M (1+c)/(1-c) - 2c (1 - c^M)/(1-c)^2. It is M^2 for c = 1 and tends to M (1+c)/(1-c) once M (1-c) is large."""
    M, gap = np.broadcast_arrays(np.asarray(far, float), 1 - np.asarray(factor, float))
    small = M * gap < 1e-5                         # there the two terms cancel; the sum is M^2 - gap (M^3 - M) / 3
    g = np.where(small, 0.5, gap)
    exact = M * (2 - g) / g + 2 * (1 - g) * np.expm1(M * np.log1p(-g)) / g ** 2
    return np.where(small, M ** 2 - gap * (M ** 3 - M) / 3, exact)


def tilt(r):
    """E[e^(r cos theta) cos theta] / E[e^(r cos theta)] = I_1(r)/I_0(r): what stays of a common value when the weights
    are a softmax of scores r cos(theta) on the *same* route. It does not fall with M; on a route of its own it is 0."""
    cosine = np.cos(np.linspace(0, 2 * np.pi, 256, endpoint=False))
    return np.average(cosine, weights=np.exp(r * cosine))


def relative_norms(head_dim):
    """R(M) of each kind of step, M (n,): length of the sum of M far values after the route over its length without, for
    a background common to all, even over the planes, and uniform weights. RoPE's equal steps of w add up to
    |sin(M w/2) / sin(w/2)| in a plane, bounded however large M is."""
    w = frequencies(head_dim)
    return {"unrouted": lambda M: np.ones(len(M)),
            "randrot": lambda M: np.sqrt(background_power(M[:, None], plane_factor(w)).mean(1)) / M,
            "every plane w = 1": lambda M: np.sqrt(background_power(M, plane_factor(1.0))) / M,
            "rope_qkv": lambda M: np.sqrt(np.square(np.sin(M[:, None] * w / 2) / np.sin(w / 2)).mean(1)) / M}


def crossing(near, lam, norm):
    """M at which a background rho R(M) outweighs a signal 1 - rho, with rho at its bound: where M R(M) reaches
    K e^(2 lambda). Good to 0.2%; inf if not below 1e15."""
    M = np.geomspace(1, 1e15, 20_001)
    return min(M[M * norm(M) >= near * math.exp(2 * lam)], default=math.inf)


def show(title, rows):
    print(f"\n{title}\n{layout([[cell if isinstance(cell, str) else f'{cell:,}' for cell in row] for row in rows])}")


def mixing():
    """Prints tables; returns the labels of its panel, the x of its last table, and its curves: {name: function of x}, or
    {name: {x: y}} for what was simulated. So do the next three."""
    w, few, rng = frequencies(HEAD_DIM), 4 ** np.arange(7), np.random.default_rng(1)
    factor = plane_factor(w)
    planes = np.stack([np.cos(phase[:, few - 1]) for phase in simulate_phases(w, few[-1], 500, rng)])
    show(f"Mixing window: steps n until E[P] falls to {EPS}, in a text of any length; and E[P] over 64 steps",
         [["plane", "w", "factor", "n", "closed form", "simulated"]] + [
             [b, f"{w[b]:.2g}", f"{factor[b]:.9f}", f"{mixing_window(factor[b]):,.0f}", f"{factor[b] ** 64:.4f}",
              f"{planes[b, :, 3].mean():.4f} ±{standard_error(planes[b, :, 3]):.4f}"] for b in (0, 4, 8, 16, 31)])
    show("Planes of randrot that have mixed. The others keep a far key much as it was",
         [["head_dim", "planes", "within 512", "65,536", "1,048,576"]] + [
             [d, d // 2, *((mixing_window(plane_factor(frequencies(d))) <= n).sum() for n in (512, 2 ** 16, 2 ** 20))]
             for d in (64, 96, 128)])
    return dict(title="1. Slow planes do not mix", xlabel="distance (tokens)", ylabel="expected score of q and q",
                yscale="linear", ylim=(-0.3, 1.05)), 16 ** np.arange(6), {
        "RoPE": lambda n: expected_score(n, np.exp(1j * w)), "randrot": lambda n: expected_score(n, factor),
        "every plane w = 1": lambda n: expected_score(n, plane_factor(1.0)),
        "reflections": lambda n: expected_score(n, reflection_factor(HEAD_DIM)),
        "randrot, simulated": dict(zip(few, planes.mean((0, 1))))}


def score_gap():
    rng, t, weights = np.random.default_rng(2), np.linspace(0, 4, 41), np.full(HEAD_DIM // 2, 2 / HEAD_DIM)
    simulated = {f"{name}, d = {d}, simulated": {s: (x >= s / math.sqrt(d)).mean() for s in t}
                 for d in (16, 256) for name, x in simulate_scores(d, 100_000, rng).items()}
    return dict(title="2. A mixed score is small", xlabel="score s, in units of 1 / sqrt(d)",
                ylabel="probability of a far score >= s", xscale="linear", xlim=(0, 4)), np.arange(1, 5), {
        **simulated, "sharp bound": lambda t: phase_bound(t / math.sqrt(HEAD_DIM), weights),
        "Hoeffding bound": lambda t: hoeffding_bound(t / math.sqrt(HEAD_DIM), weights)}


def far_tokens():
    rng, counts = np.random.default_rng(3), np.array([2 ** k for k in range(9, 20)] + [10 ** 6])
    drawn = {M: far_mass(*(rng.uniform(-LAMBDA, LAMBDA, n) for n in (NEAR, M))) for M in counts}
    alike, led = (biased_far_mass(NEAR, math.inf, lead, SLOPE) for lead in (0, -2 * LAMBDA))
    print(f"\nA bias of {SLOPE:.1g} a token holds far mass to {alike:.3f} if contents are alike, and to {led:.4f} "
          f"if far ones lead by {2 * LAMBDA:g} nats.")
    return dict(title=f"3. Far mass beside {NEAR} near keys, logits within ±{LAMBDA:g}", xlabel="far tokens M",
                ylabel="far mass"), counts[::4], {  # all but the drawn one with near keys on top, by 2 lambda
        "lower bound": lambda M: far_mass_bound(NEAR, M, LAMBDA),
        f"bias {SLOPE:.1g}": lambda M: biased_far_mass(NEAR, M, 2 * LAMBDA, SLOPE),
        f"window {WINDOW}": lambda M: far_mass_bound(NEAR, np.minimum(M, WINDOW - NEAR), LAMBDA),
        "log n": lambda M: far_mass_bound(NEAR, M, logn_lambda(LAMBDA, NEAR, M)),
        "log n from ±2": lambda M: far_mass_bound(NEAR, M, logn_lambda(2, NEAR, M)), "uniform, simulated": drawn}


def far_values():
    few, norms, rng = 4 ** np.arange(6), relative_norms(HEAD_DIM), np.random.default_rng(4)
    phases = simulate_phases(frequencies(HEAD_DIM), few[-1], 1000, rng)
    power = np.mean([np.abs(np.exp(1j * phase).cumsum(1)[:, few - 1]) ** 2 for phase in phases], (0, 1))
    print("\nFar values outweigh the near signal from M = "
          + ", ".join(f"{crossing(NEAR, LAMBDA, norm):,.3g} ({name})" for name, norm in norms.items()))
    print("Weights that follow scores r cos(theta) on the same route leave I_1(r)/I_0(r) of their common part at any M: "
          + ", ".join(f"{tilt(r):.2f} at r = {r:g}" for r in (0.25, 0.5, 1, 2)))
    return dict(title="4. Length of far values' common part after the route, over before", xlabel="far tokens M", ylabel="R"
                ), 4.0 ** np.arange(0, 12, 2), norms | {"randrot, simulated": dict(zip(few, np.sqrt(power) / few))}


def argument(path):
    """Print parts 1 to 4, and draw them to `path` if matplotlib is there."""
    panels = []
    for labels, at, curves in (part() for part in (mixing, score_gap, far_tokens, far_values)):
        columns = [[f"{y:.5f}" for y in curve(at)] if callable(curve) else
                   [f"{curve[x]:.5f}" if x in curve else "" for x in at] for curve in curves.values()]
        show(labels["title"], [[labels["xlabel"], *curves], *([f"{x:,.0f}", *row] for x, *row in zip(at, *columns))])
        panels.append((labels, curves))
    with picture(path, 2, 2, figsize=(13, 9)) as axes:
        for axis, (labels, curves) in zip(axes.flat, panels):
            grid = np.linspace(*labels["xlim"], 41) if "xlim" in labels else np.geomspace(1, 1e6, 200)
            for name, curve in curves.items():
                axis.plot(*((grid, curve(grid)) if callable(curve) else zip(*curve.items())),
                          "--" if "bound" in name else "-" if callable(curve) else ".", label=name)
            axis.set(**{"xscale": "log", "yscale": "log", "ylim": (1e-5, 1.5)} | labels)
            axis.legend(fontsize=8)
    print(f"picture: {path}")


QUERIES, AT_ONCE = 64, 8  # queries measured in a window; how many of them against all keys at a time
MEASURED = ("far_mass", "bound", "mean_bound", "logit_range", "near_norm", "far_norm", "alignment")


def head_statistics(attention, frame, x, queries, block_size):
    """What the queries at positions `queries` do in one layer, x (1, T, C) its input: {MEASURED: (H, queries) float64}.
    far: keys block_size or more tokens back. logit_range: largest minus smallest logit of a query, 2 lambda, nats, bias
    included. bound: far mass's, from that range; mean_bound, by Jensen: M / (M + K e^(largest near - mean far)). near_norm,
    far_norm: lengths of both parts of the output, before the projection; alignment: far_norm over what it would be were all
    far values parallel. Lengths are the same in the common frame. Memory is AT_ONCE x T."""
    q, k, v = (t[0] for t in frame.enter(attention.project(x)))                   # (H, T, D) each
    key, found = torch.arange(x.size(1), device=x.device), []
    for i in queries[:, None].split(AT_ONCE):
        seen, far = key <= i, key <= i - block_size                                 # (AT_ONCE, T)
        logits = (q[:, i[:, 0]] @ k.transpose(1, 2)).double() / attention.head_dim ** 0.5  # (H, AT_ONCE, T)
        if frame.key_bias is not None:
            c = frame.key_bias[0].to(x.device)
            bias = c[:, None] - c[:, i]
            if frame.floor is not None:
                bias = torch.logaddexp(bias, frame.floor.double()[:, None, None] - (i + 1).double().log())
            logits = logits + bias
        lowest, logits = logits.masked_fill(~seen, math.inf).amin(-1), logits.masked_fill(~seen, -math.inf)
        span, weight, M = logits.amax(-1) - lowest, logits.softmax(-1), far.sum(-1)
        near, distant = weight * ~far, weight * far
        lead = logits.masked_fill(far, -math.inf).amax(-1) - logits.masked_fill(~far, 0).sum(-1) / M.clamp(min=1)
        near_norm, far_norm = ((part.to(v.dtype) @ v).norm(dim=-1).double() for part in (near, distant))
        parallel = (distant @ v.norm(dim=-1).double()[..., None])[..., 0]
        found.append((distant.sum(-1), *(M / (M + block_size * gap.exp()) for gap in (span, lead)), span,
                      near_norm, far_norm, far_norm / parallel.clamp(min=1e-30)))
    return {name: torch.cat(parts, -1) for name, parts in zip(MEASURED, zip(*found))}


def coherence(route, probe, distances):
    """|mean over queries of P x| for the routes over each distance, 1 is rigid, 0 mixed: (H, distances, planes). `probe`
    (1, H, T, D) gives shape and device. x is (1, 0) in every plane: for rotations the plane's |mean e^(i(phase_i -
    phase_j))|; other routes count as one plane. In T tokens, below sqrt(window / T) is noise."""
    half = (probe.size(-1) + 1) // 2
    entered = route.enter(torch.cat((torch.ones_like(probe[..., :half]), torch.zeros_like(probe[..., half:])), dim=-1))
    moved = torch.stack([route.leave(entered.roll(n, 2))[0, :, n:].double().mean(1) for n in distances], 1)  # (H, n, D)
    return torch.hypot(*moved.chunk(2, dim=-1)) if hasattr(route, "cos") else moved.norm(dim=-1, keepdim=True) / half ** 0.5


def turns(route):
    """Steps of a route that rotates planes, read off its phases: the mean step of each plane in radians, (H, D/2), and how
    far every token but the first turns off that mean, root mean square over planes, (H, T - 1)."""
    phase = torch.complex(route.cos[0], route.sin[0])                               # (H or 1, T, D/2)
    step = phase[:, 1:] * phase[:, :-1].conj()
    mean = step.mean(1, keepdim=True)
    return mean[:, 0].angle(), (step * mean.conj()).angle().square().mean(-1).sqrt()


@torch.inference_mode()
def diagnose(model, ids, sequence, distances=(), n_queries=QUERIES):
    """Of one text ids (T,): head_statistics by layer, {name: (n_layer, H, queries)}; coherence of the queries' route,
    (n_layer, H, distances, planes), or [] without distances; a list of turns() by layer, or [] if planes do not turn. The
    queries are spread over the last half of a training length: the same tokens for any T that ends there."""
    T, block_size = len(ids), model.config.block_size
    late = min(T, max(1, block_size // 2))
    queries = torch.linspace(T - late, T - 1, min(n_queries, late), device=ids.device).round().long()
    idx, sequence, found, routes, turned = ids[None], torch.tensor([sequence], device=ids.device), [], [], []
    x, embedding = model.enter(idx)
    for block in model.blocks:
        normed = block.norm_1(x)
        frame = block.attention.position(normed, embedding, idx, sequence)
        found.append(head_statistics(block.attention, frame, normed, queries, block_size))
        if len(distances):
            routes.append(coherence(frame.qk, normed.unflatten(2, (block.attention.n_head, -1)).transpose(1, 2), distances))
        if hasattr(frame.qk, "cos"):
            turned.append(turns(frame.qk))
        x = block(x, embedding, idx, sequence)
    found = {name: torch.stack([layer[name] for layer in found]) for name in MEASURED}
    return found, routes and torch.stack(torch.broadcast_tensors(*routes)), turned  # +nope: rigid in every plane


def measure(path, args):
    """Everything the report says of one checkpoint, as a dict that JSON can hold."""
    model = GPT.from_checkpoint(path, device_of("cuda" if torch.cuda.is_available() else "cpu"))  # MPS has no float64
    config, trained, block_size, rows = model.config, model.checkpoint, model.config.block_size, []
    if config.pos.split("+")[0] == "path":
        raise UsageError(f"ckpt={path}: pos={config.pos} has no common frame; measure one with orthogonal steps")
    shards = held_out(args.data, trained, path)
    lengths = args.lengths or [block_size * k for k in MULTIPLES if block_size * k <= len(shards)] or [block_size]
    lengths, longest = sorted(set(lengths)), max(lengths)
    if not 2 <= longest <= len(shards):
        raise UsageError(f"lengths={longest}: give 2 to {len(shards)}, the tokens of the val split")
    distances = [2 ** k for k in range(longest.bit_length() - 1)]
    for length in lengths:  # texts end at places spread over the split, the same for every length
        ends = enumerate(np.linspace(longest, len(shards), args.texts).astype(int).tolist())
        looks = [diagnose(model, torch.from_numpy(shards.read(end - length, length)).to(model.head.weight.device), n,
                          distances if length == longest else ()) for n, end in ends]
        rows.append({"length": length} | {name: rounded(torch.cat([found[name] for found, *_ in looks], -1).mean(-1))
                                          for name in MEASURED})                    # (n_layer, H), means over queries
    route, turned, steps = torch.stack([route for _, route, _ in looks]).mean(0), looks[-1][2], None
    if turned:                                                                      # of the last and longest text
        speed, off = (torch.stack(part) for part in zip(*turned))                   # (n_layer, H, planes), (..., T - 1)
        ids = torch.from_numpy(shards.read(len(shards) - longest, longest))[1:]
        common = ids.bincount().topk(min(24, len(ids.unique()))).indices.tolist()
        steps = {"speed": rounded(speed), "turn": {str(i): rounded(off[..., ids == i].mean()) for i in common}}
    return {"label": label_of(config, trained), "checkpoint": path, "seed": config.seed, "step": trained["step"],
            "block_size": block_size, "data": shards.meta["source"], "texts": args.texts, "lengths": rows,
            "distances": distances, "coherence": rounded(route), "window": window(distances, route.mean((0, 1, 3)).tolist()),
            "steps": steps, "bytes": shards.meta["tokenizer"] == "bytes"}


def window(distances, coherence):
    """Tokens until a measured coherence has fallen to 1/e, log-linear between distances; None if it has not."""
    for m, a, n, b in zip([0, *distances], [1, *coherence], distances, coherence):
        if b <= 1 / math.e:
            return m + (n - m) * (1 + math.log(a)) / math.log(a / b)


def finite(value):
    return real(value) and value is not None and math.isfinite(value)


# What a file of --json must say to be shown again: a list of such measurements.
RESULTS = [{"label": str, "checkpoint": str, "seed": count, "step": count, "block_size": lambda n: count(n) and n > 0,
            "bytes": bool, "window": lambda n: n is None or finite(n) and n > 0, "distances": [count],
            "coherence": [[[[finite]]]], "lengths": [{"length": count} | {name: [[finite]] for name in MEASURED}],
            "steps": lambda steps: steps is None or not misfit(steps, {"speed": [[[finite]]], "turn": dict})}]


def read_measured(path):
    try:
        results = read_json(path, RESULTS)
        for r in results:
            *heads, n, planes = np.shape(r["coherence"])                            # ValueError if lists are uneven
            shapes = {np.shape(row[name]) for row in r["lengths"] for name in MEASURED}
            steps = r["steps"] or {"speed": np.zeros((heads[0], 1, planes)), "turn": {}}
            if (shapes != {tuple(heads)} or 0 in (*heads, n, planes) or r["distances"] != [2 ** k for k in range(n)]
                    or np.shape(steps["speed"])[2:] != (planes,) or len(steps["speed"]) > heads[0]
                    or not all(finite(x) and 0 <= int(token) <= sys.maxunicode for token, x in steps["turn"].items())):
                raise ValueError(f"what {r['label']} says of its heads does not fit together")
        return results
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not measurements of theory.py --json ({error})") from None


def rounded(x):
    return x.double().round(decimals=6).tolist()


def report(results, evaluated):
    """Tables of what was measured, and the ratio, where it is among eval_length.py's results `evaluated`. Returns (label,
    (training length in windows, ratio), training length) where all is known and only mixing holds far mass."""
    names, routes, points = row_names(results), [], []
    for name, r in zip(names, results):
        route, last = np.array(r["coherence"]), r["lengths"][-1]                    # (n_layer, H, distances, planes)
        mixed = (route[:, :, np.array(r["distances"]) <= r["block_size"]].min(2) <= EPS).sum(-1)
        n, L, longest = r["window"], r["block_size"], last["length"]
        same = [other for other in evaluated if all(other[key] == r[key] for key in ("checkpoint", "label", "data"))]
        ratio = {row["length"]: row["ratio"] for other in same for row in other["lengths"]}.get(longest)
        reach = ("-", L, "-") if n is None else (f"{n:.1f}", L, f"{L / n:.1f}")
        routes.append([name, longest, *(f"{np.mean(last[key]):.3f}" for key in MEASURED[:3]),
                       f"{ratio:.3f}" if ratio else "-", *reach, f"{mixed.mean():.1f} of {route.shape[-1]}"])
        if n and ratio and math.isfinite(ratio) and "+" not in r["label"]:
            points.append((r["label"] + ", from RoPE" * bool(same[0]["train"]["init_from"]), (L / n, ratio), L))
        rows = [[f"at {x['length']}", *(f"{np.mean(x[key]):.3g}" for key in MEASURED), ""] for x in r["lengths"]]
        rows += [[f"layer {i} head {h}", *(f"{last[key][i][h]:.3g}" for key in MEASURED), n]
                 for (i, h), n in np.ndenumerate(mixed)]
        show(f"{name} ({r['checkpoint']}): mean of heads at each length; then each head at the last, with its planes\n"
             f"that mix within {r['block_size']} tokens, of {route.shape[-1]}",
             [["mean of heads", *MEASURED, "planes mixed"], *rows])
        planes = np.unique(np.linspace(0, route.shape[-1] - 1, 9).astype(int))
        show(f"{name}: coherence of the route against distance, mean of heads",
             [["distance", *(f"plane {b}" for b in planes)]] + [
                 [n, *(f"{x:.2f}" for x in at[planes])] for n, at in zip(r["distances"], route.mean((0, 1)))])
        if r["steps"]:
            speed, turn = np.array(r["steps"]["speed"]).mean((0, 1)), r["steps"]["turn"]
            show(f"{name}: mean step of a plane, radians, over layers and heads, beside RoPE's",
                 [["plane", *map(str, planes)], ["step", *(f"{x:.2g}" for x in speed[planes])],
                  ["RoPE", *(f"{x:.2g}" for x in frequencies(2 * len(speed))[planes])]])
            print("the commonest tokens, by how far they turn off it, rms radians: " + ", ".join(
                f"{chr(int(i)) if r['bytes'] else int(i)!r} {x:.2f}"
                for i, x in sorted(turn.items(), key=lambda item: -item[1])))
    show("At the longest: mass on keys a training length back or more, its two bounds, and the perplexity ratio. Routes:\n"
         "tokens until the coherence of all planes is 1/e, training lengths over that, planes that mix within one",
         [["", "length", *MEASURED[:3], "ratio", "tokens", "trained", "in windows", "planes mixed"], *routes])
    return points


def draw(points, path):
    with picture(path, 1, 1, figsize=(8, 4.5)) as axis:
        for i, label in enumerate(dict.fromkeys(label for label, *_ in points)):
            axis.plot(*zip(*(at for name, at, _ in points if name == label)), "o" if i < 10 else "^", color=f"C{i % 10}",
                      label=label)
        for _, at, block_size in points:
            axis.annotate(f" {block_size}", at, fontsize=7)
        axis.set(xscale="log", xlabel="training length / mixing window measured in the trained model; beside it: tokens",
                 ylabel="perplexity ratio at the longest length", title="How many mixing windows does training need?")
        axis.xaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
        axis.legend(fontsize=8)
    print(f"picture: {path}")


@program
def main(argv=None):
    parser = Parser(__doc__)
    parser.add_argument("--plot", help="picture of parts 1 to 4 (theory.png), or of ratios; needs matplotlib")
    parser.add_argument("--ckpt", nargs="+", action="extend", default=[], help="measure these instead: part 5")
    parser.add_argument("more", nargs="*", metavar="CKPT", help="more of them, or .json files that --json wrote")
    parser.add_argument("--data", help="directory of prepare_data.py (the one the checkpoint was trained on)")
    parser.add_argument("--lengths", type=integers(1), help="e.g. 256,1024 (training length times 1, 2 ... 128)")
    parser.add_argument("--texts", type=integer(1, 10_000), default=2, help="places of the val split to measure at (2)")
    parser.add_argument("--ratios", nargs="+", metavar="JSON", default=[], help="results of eval_length.py on the same: "
                        "adds the ratio at the longest length; --plot draws it against mixing windows")
    parser.add_argument("--json", help="write what was measured on the checkpoints to this file")
    args = parser.parse_args(argv)
    args.inputs = (measured := args.ckpt + args.more) + args.ratios
    check_outputs(args)
    if unused := not measured and [name for name in ("data", "lengths", "json", "ratios") if getattr(args, name)]:
        raise UsageError(f"{unused[0]}={getattr(args, unused[0])}: is for checkpoints; add --ckpt=CKPT")
    if measured:
        if args.plot and not args.ratios:
            raise UsageError(f"plot={args.plot}: of checkpoints, draws the --ratios against mixing windows; give these too")
        evaluated = [r for path in args.ratios for r in read_results(path)]
        results = sum((read_measured(path) if path.endswith(".json") else [measure(path, args)] for path in measured), [])
        points = report(results, evaluated)
        if args.json:
            write_json(args.json, results, indent=None)
        if args.ratios and args.plot:
            draw(points, args.plot)
    else:
        try:
            argument(args.plot or "theory.png")
        except UsageError as error:  # the tables need no matplotlib
            print(f"no picture: {error}")


if __name__ == "__main__":
    sys.exit(main())
