"""Train one model: on one device, on many GPUs, or on CPUs.

    python train.py --config=demo --pos=rope                        # minutes on a laptop
    torchrun --standalone --nproc_per_node=8 train.py --pos=accrot_qkv   # the paper's run on 8 GPUs

Every batch is a pure function of (seed, step, index in the batch), and dropout is reseeded at every pass. So any number
of ranks sees the same sequences, and a resumed run continues exactly. Output: OUT/ckpt.pt and OUT/log.jsonl.
"""
import argparse, hashlib, json, math, os, platform, re, signal, subprocess, sys, time
from contextlib import suppress
from dataclasses import asdict, fields

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from checks import CheckpointError, Parser, UsageError, integer, misfit, number, program, switch, whole
from model import GPT, GPTConfig, autocast_for, check_compiler, device_of, is_weights, read_checkpoint
from positional import check_upgrade, parse_position
from prepare_data import TokenShards

# Every knob: name, default (that of --config=paper), type, what it is. --config=demo changes those under DEMO.
KNOBS = (
    ("pos", "accrot_qkv", str, "mechanism: a name of positional.POSITIONS, then any of +alibi +fox +logn +nope +conv +floor"),
    ("angles", "token", str, "where accrot's angles come from: token, table or hidden"),
    ("value_route", "shared", str, "values travel the queries' route (shared) or one of their own (own)"),
    ("data", "data/openwebtext", str, "directory that prepare_data.py wrote"),
    ("out", "", str, "directory of checkpoint and log; empty: out/CONFIG-POS-SEED"),
    ("seed", 1337, integer(0, 2 ** 32 - 1), "of initial weights, data order, dropout and random steps"),
    ("n_layer", 16, integer(1), "blocks"),
    ("n_head", 8, integer(1), "heads; must divide n_embd"),
    ("n_embd", 768, integer(1), "width"),
    ("block_size", 512, integer(1), "training length, in tokens"),
    ("dropout", 0.1, number(0, 0.99), "on the embedding and on residual branches"),
    ("cross_batch", 1, integer(1), "sequences of a batch that layers opened by +nope read as one text in training, "
                                   "so that they learn to pass over what is far (arXiv 2307.03170); must divide what a rank "
                                   "takes at once, batch_size / (ranks x grad_accum)"),
    ("batch_size", 32, integer(1), "sequences per optimizer step, over all ranks"),
    ("grad_accum", 1, integer(1), "forward passes that make up one step; ranks x grad_accum must divide batch_size"),
    ("max_steps", 200_000, integer(0), "optimizer steps; 0 only writes the initial checkpoint"),
    ("stop_at", 0, integer(0), "save and stop at this step, to go on later with --resume; 0: at max_steps"),
    ("schedule", "piecewise", str, "piecewise: lr for half of the steps, 0.4 lr for a quarter, 0.1 lr for the last; "
                                   "cosine: warm-up, then a cosine to 0.1 lr"),
    ("lr", 5e-4, number(0), "highest learning rate"),
    ("warmup", 0.05, number(0, 1), "fraction of max_steps with a rising rate (cosine only)"),
    ("weight_decay", 0.1, number(0), "AdamW, on matrices; never on a mechanism's own parameters"),
    ("beta2", 0.95, number(0, 0.999999), "AdamW's second moment; the first has 0.9"),
    ("clip", 1.0, number(0), "largest gradient norm; 0: no clipping"),
    ("eval_interval", 1000, integer(1), "steps between validation losses; each saves a checkpoint"),
    ("eval_tokens", 262_144, integer(1), "validation tokens, always the same ones"),
    ("log_interval", 10, integer(1), "steps between lines of the log"),
    ("device", "auto", str, "auto (cuda, else mps, else cpu), cuda, mps or cpu"),
    ("dtype", "auto", str, "auto, float32 or bfloat16 (autocast; auto: on CUDA only). Weights and phases stay float32"),
    ("compile", False, switch, "torch.compile the model into one graph (on CPU this needs a C++ compiler)"),
    ("init_from", "", str, "checkpoint to upgrade: rope to accrot_qk, rope_qkv to accrot_qkv, equal logits at the start"),
    ("resume", False, switch, "continue from OUT/ckpt.pt if there is one, with its settings"),
    ("overwrite", False, switch, "discard what OUT holds"),
)
DEMO = dict(data="data/stdlib", n_layer=4, n_head=2, n_embd=128, block_size=256, dropout=0.0, batch_size=12,
            max_steps=600, schedule="cosine", lr=2e-3, eval_interval=200, eval_tokens=65_536)
PRESETS = {"paper": {}, "demo": DEMO}
# What may differ between a checkpoint and the run that resumes it. All else would make it another run.
FREE_ON_RESUME = {"out", "data", "grad_accum", "stop_at", "eval_interval", "eval_tokens", "log_interval", "device",
                  "dtype", "compile", "resume", "overwrite"}
# Dense bf16 peak of one device in FLOP/s, from NVIDIA's data sheets, for MFU.
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12, "3090": 71e12}


def parse(argv):
    """The settings as a dict with every knob, and the set of those given on the command line."""
    parser = Parser(__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", choices=PRESETS, help="preset that the flags below change (paper)")
    for name, default, kind, text in KNOBS:
        optional = dict(nargs="?", const=True, metavar="true|false") if kind is switch else {}
        shown = f"{default!r}" + (f"; demo: {DEMO[name]!r}" if name in DEMO else "")
        parser.add_argument(f"--{name}", type=kind, help=f"{text} ({shown})".replace("%", "%%"), **optional)
    given = vars(parser.parse_args(argv))
    preset = given.get("config", "paper")
    settings = {name: default for name, default, *_ in KNOBS} | {"config": preset} | PRESETS[preset] | given
    settings["out"] = settings["out"] or f"out/{settings['config']}-{settings['pos']}-{settings['seed']}"
    if not settings["resume"]:  # one that resumes has the rest from its checkpoint
        check(settings)
    return settings, set(given)


def check(settings):
    """UsageError for settings that do not fit together, before any data is read."""
    for name, legal in (("schedule", ("piecewise", "cosine")), ("dtype", ("auto", "float32", "bfloat16"))):
        if settings[name] not in legal:
            raise UsageError(f"{name}={settings[name]}: use one of {', '.join(legal)}")
    if settings["eval_tokens"] < settings["block_size"]:
        raise UsageError(f"eval_tokens={settings['eval_tokens']}: give at least block_size={settings['block_size']}")
    if re.search("[\ud800-\udfff]", settings["out"]):
        raise UsageError(f"out={settings['out']!r}: not UTF-8, and torch.load could not find it again; choose another")
    if settings["resume"] and settings["overwrite"]:
        raise UsageError("resume and overwrite exclude each other: leave one out")
    if settings["batch_size"] * settings["block_size"] > 2 ** 31:
        raise UsageError(f"batch_size={settings['batch_size']}: times block_size={settings['block_size']} is more than "
                         f"2^31 tokens a step")
    config, together = model_config(settings, vocab_size=1), settings["cross_batch"]
    if together > 1 and "nope" not in parse_position(config.pos)[2]:
        raise UsageError(f"cross_batch={together}: pos={config.pos} opens no layer to other sequences; use one with +nope, "
                         "as pos=accrot_qkv+fox+nope")


def model_config(settings, vocab_size):
    return GPTConfig(vocab_size=vocab_size, **{f.name: settings[f.name] for f in fields(GPTConfig) if f.name in settings})


class Ranks:
    """The processes of one run: this one's rank, their number, the device, and sums over all."""
    def __init__(self, wanted):
        several = "RANK" in os.environ
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if several and name not in os.environ:
                raise UsageError(f"RANK={os.environ['RANK']} is set and {name} is not; start several processes with torchrun")
        self.rank, self.size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")) if several else (0, 1)
        self.device = device_of(wanted)
        if self.device.type == "mps" and self.size > 1:
            raise UsageError("device=mps: needs a single process; use --device=cpu")
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            if self.device.index >= torch.cuda.device_count():
                raise UsageError(f"device=cuda: rank {self.device.index} of this machine has no GPU, there are "
                                 f"{torch.cuda.device_count()}; use --device=cpu or a smaller --nproc_per_node")
            torch.cuda.set_device(self.device)
        if several:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def sum(self, values):
        """values (a list of numbers or scalar tensors) summed over the ranks, as Python floats."""
        total = torch.stack([torch.as_tensor(v, device=self.device).float() for v in values])  # MPS has no float64
        if dist.is_initialized():
            total = total.double()
            dist.all_reduce(total)
        return total.tolist()


def draw(seed, step, index):
    """Two independent 63-bit integers for sequence `index` of a step's batch: where it starts, and its sequence id."""
    digest = hashlib.blake2b(f"{seed}/{step}/{index}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little") >> 1, int.from_bytes(digest[8:], "little") >> 1


def training_batch(shards, settings, step, indices):
    """Inputs and targets (len(indices), block_size) int64 and sequence ids (len(indices),), all on the CPU."""
    length = settings["block_size"]
    starts, sequence = zip(*(draw(settings["seed"], step, index) for index in indices))
    rows = torch.from_numpy(shards.rows([start % (len(shards) - length) for start in starts], length + 1))
    return rows[:, :-1], rows[:, 1:], torch.tensor(sequence)


@torch.no_grad()
def validation_loss(model, shards, settings, ranks, autocast):
    """Mean loss in nats over the same windows at every call, whatever the number of ranks. Uses no randomness."""
    length, total = settings["block_size"], 0.0
    windows = min(settings["eval_tokens"], len(shards) - 1) // length
    per_pass = settings["batch_size"] // (ranks.size * settings["grad_accum"])
    mine = range(ranks.rank, windows, ranks.size)
    model.eval()
    for first in range(0, len(mine), per_pass):
        chosen = mine[first:first + per_pass]
        rows = torch.from_numpy(shards.rows([w * length for w in chosen], length + 1)).to(ranks.device)
        sequence = torch.tensor(chosen, device=ranks.device)
        with autocast():  # forward is never the compiled one: another mode or a short last batch would compile anew
            losses = model.forward(rows[:, :-1], rows[:, 1:], sequence, reduction="none")[1]
        total += losses.cpu().double().sum().item()
    model.train()
    return ranks.sum([total])[0] / (windows * length)


def learning_rate(settings, step):
    """Rate of optimizer step `step`, counted from 0."""
    done = step / max(1, settings["max_steps"])
    if settings["schedule"] == "piecewise":
        return settings["lr"] * (1.0 if done < 0.5 else 0.4 if done < 0.75 else 0.1)
    warmup = settings["warmup"]
    if done < warmup:
        return settings["lr"] * (step + 1) / (warmup * settings["max_steps"] + 1)
    return settings["lr"] * (0.55 + 0.45 * math.cos(math.pi * (done - warmup) / max(1e-9, 1 - warmup)))


def make_optimizer(model, settings, device):
    """AdamW; weight decay on the network's matrices only. Angles and gates are not pulled towards zero."""
    decayed, free = [], []
    for name, p in model.named_parameters():
        (decayed if p.dim() >= 2 and ".position." not in name else free).append(p)
    groups = [{"params": decayed, "weight_decay": settings["weight_decay"]}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings["lr"], betas=(0.9, settings["beta2"]), fused=device.type != "mps")


def load_moments(optimizer, saved, path):
    """Give AdamW its moments back, once their shapes are seen to be the parameters'. Its settings stay this run's."""
    def like(shape):
        return lambda value: is_weights({"": value}) and value.shape == shape
    shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
    moments = {i: {"step": like(()), "exp_avg": like(s), "exp_avg_sq": like(s)} for i, s in enumerate(shapes)}
    if wrong := misfit(saved, {"state": dict}) or saved["state"] and misfit(saved["state"], moments):  # {}: no step yet
        raise CheckpointError(f"{path}: its optimizer is not that of its model: {wrong}; --init_from takes weights alone")
    optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["state"]})


def save_checkpoint(path, model, optimizer, step, settings, meta):
    """Whole or absent, so that a run killed while saving has its previous checkpoint."""
    with whole(path, "wb") as file:
        torch.save({"config": asdict(model.config), "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "step": step, "train": settings, "data": meta}, file)


class Log:
    """log.jsonl, one JSON object a line: first what the run is, then its steps and validation losses. Resuming drops
    what was logged after the saved step, and lines that a crash has cut short or spoilt."""
    def __init__(self, path, resumed_at):
        kept = []
        if resumed_at is not None and os.path.exists(path):
            with open(path, errors="replace") as file:
                for line in file:
                    with suppress(ValueError, LookupError, TypeError, OverflowError, RecursionError):
                        if line.endswith("}\n") and float(json.loads(line)["step"]) <= resumed_at:
                            kept.append(line)
        with whole(path) as file:
            file.writelines(kept)
        self.file = open(path, "a", buffering=1)

    def write(self, **entry):
        self.file.write(json.dumps(entry) + "\n")


def environment(ranks):
    """What a reader of the log needs to know of the machine and the source."""
    def git(*words):
        here = os.path.dirname(os.path.abspath(__file__))
        with suppress(OSError, subprocess.CalledProcessError):  # None without git or its records
            return subprocess.run(("git", *words), cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "changed": None if changed is None else bool(changed),
            "python": platform.python_version(), "torch": torch.__version__, "device": device_name(ranks.device),
            "ranks": ranks.size, "threads": torch.get_num_threads()}


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"


def resumed_settings(settings, given, checkpoint, path):
    """A resumed run has the checkpoint's settings. A flag that says otherwise is refused, but for those that say where
    and how the same run is computed. (Of these, dtype changes rounding, and grad_accum dropout's masks.)"""
    old = {name: checkpoint["train"].get(name) for name in settings}
    for name, _, kind, _ in (*KNOBS, ("config", "", str, "")):  # as strict as the command line: it may be anybody's
        with suppress(argparse.ArgumentTypeError):
            if isinstance(old[name], (str, int, float)) and (value := kind(str(old[name]))) == old[name]:
                old[name] = value  # 2.0 is 2
                continue
        raise CheckpointError(f"{path}: no settings of a run: {name} is {old[name]!r}")
    for name in sorted(given - FREE_ON_RESUME):
        if settings[name] != old[name]:
            raise UsageError(f"{name}={settings[name]}: {path} was trained with {name}={old[name]}; "
                             f"leave --{name} out, or choose another --out")
    return old | {name: settings[name] for name in given & FREE_ON_RESUME | {"out", "resume", "overwrite", "stop_at"}}


def train(settings, given, ranks):
    (path, log_path), checkpoint = (os.path.join(settings["out"], name) for name in ("ckpt.pt", "log.jsonl")), None
    if not settings["resume"] and not settings["overwrite"] and any(map(os.path.exists, (path, log_path))):
        raise UsageError(f"out={settings['out']}: holds a run; go on with --resume, start over with --overwrite, or choose "
                         "another --out")
    if settings["overwrite"] and settings["init_from"] and os.path.realpath(settings["init_from"]) == os.path.realpath(path):
        raise UsageError(f"init_from={path}: would be overwritten; choose another --out")
    if settings["resume"] and os.path.exists(path):
        checkpoint = read_checkpoint(path)
        settings = resumed_settings(settings, given, checkpoint, path)
    if settings["resume"]:  # else parse has done it
        check(settings)
    data, batch_size, block_size, grad_accum = map(settings.get, ("data", "batch_size", "block_size", "grad_accum"))
    shards, held_out = TokenShards(data, "train"), TokenShards(data, "val")
    for split, row in (("train", shards), ("val", held_out)):
        if len(row) <= block_size:
            raise UsageError(f"block_size={block_size}: the {split} split of {data} has only {len(row)} tokens")
    micro, rest = divmod(batch_size, ranks.size * grad_accum)
    if rest:
        raise UsageError(f"batch_size={batch_size}: must be a multiple of ranks x grad_accum = "
                         f"{ranks.size} x {grad_accum}")
    if micro % settings["cross_batch"]:
        raise UsageError(f"cross_batch={settings['cross_batch']}: must divide the {micro} sequences that a rank takes at "
                         f"once: batch_size={batch_size} over ranks x grad_accum = {ranks.size} x {grad_accum}")
    if checkpoint and checkpoint["data"]["shards"] != shards.meta["shards"]:
        raise UsageError(f"data={data}: not the tokens that {path} was trained on")
    device, leader = ranks.device, ranks.rank == 0
    autocast = autocast_for(device, settings["dtype"])
    low = autocast.keywords["enabled"]

    model = GPT(model_config(settings, shards.vocab_size)).to(device)
    for layer in model.blocks:
        if layer.attention.position.open:
            layer.attention.position.cross_batch = settings["cross_batch"]
    optimizer = make_optimizer(model, settings, device)
    first = checkpoint["step"] if checkpoint else 0
    if checkpoint:
        if asdict(model.config) != checkpoint["config"]:
            raise CheckpointError(f"{path}: its config is not that of its settings and of {data}")
        model.load_weights(checkpoint["model"], path)
        load_moments(optimizer, checkpoint.get("optimizer"), path)
    elif settings["init_from"]:  # weights of another mechanism that this one equals at birth (positional.UPGRADES)
        source = read_checkpoint(settings["init_from"])
        check_upgrade(source["config"]["pos"], settings["pos"])
        for name in ("vocab_size", "n_layer", "n_head", "n_embd"):
            if (old := source["config"][name]) != (new := getattr(model.config, name)):
                raise UsageError(f"init_from={settings['init_from']}: has {name}={old}, this run {new}")
        model.load_weights(source["model"], settings["init_from"], missing_ok=lambda name: ".position.steps." in name)
        del source  # which is mapped from its file
    if settings["compile"]:
        check_compiler(device)
        model.compile(fullgraph=True, dynamic=False)
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model

    ranks.sum([0])  # they meet: nobody writes before everybody has checked
    if leader:
        os.makedirs(settings["out"], exist_ok=True)
        if settings["overwrite"] and os.path.exists(path):
            os.remove(path)
        log = Log(log_path, first if checkpoint else None)
        n_params = sum(p.numel() for p in model.parameters())
        mechanism = sum(p.numel() for name, p in model.named_parameters() if ".position." in name)
        log.write(step=first, run=settings, environment=environment(ranks), parameters=n_params)
        tqdm.write(f"{settings['pos']}: {n_params:,} parameters, {mechanism:,} of them the mechanism's; "
                   f"{device_name(device)} x {ranks.size}, {'bfloat16 autocast' if low else 'float32'}; "
                   f"{settings['out']}{f', resumed at step {first}' if checkpoint else ''}")

    stop_signals = []
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda which, _: stop_signals.append(which))

    last = min(settings["max_steps"], settings["stop_at"] or settings["max_steps"])
    per_step = batch_size * block_size
    words = device_name(device).replace("-", " ").split()
    peak = next((value for name, value in PEAK.items() if name in words), None) if low else None
    flops = model.flops_per_token(block_size)

    def batches():
        """What this rank takes in each pass of each step: r micro ... (r + 1) micro of the pass's sequences."""
        for step in range(first, last):
            for begin in range(ranks.rank * micro, batch_size, ranks.size * micro):
                yield [t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)
                       for t in training_batch(shards, settings, step, range(begin, begin + micro))]

    bar = tqdm(total=last, initial=first, unit="step", disable=None if leader else True, leave=False)
    model.train()
    step, logged, started, finished = first, first, time.perf_counter(), first >= last
    coming = batches()
    ahead = next(coming, None)

    while not finished:
        lr = learning_rate(settings, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = torch.zeros((), device=device)
        for accum in range(grad_accum):
            torch.manual_seed(draw(settings["seed"], step, f"dropout {accum} {ranks.rank}")[0])
            wrapped.require_backward_grad_sync = accum + 1 == grad_accum  # DDP: ranks meet at the last pass only
            with autocast():
                share = wrapped(*ahead)[1] / grad_accum
            share.backward()
            loss += share.detach()
            ahead = next(coming, None)  # the next batch is read while the device still computes this one
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"] or math.inf)
        loss, norm, stopping = (total / ranks.size for total in ranks.sum([loss, norm, float(bool(stop_signals))]))
        if not math.isfinite(loss + norm):
            raise diverged(f"step {step + 1}: loss {loss}, gradient norm {norm}", path, settings)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        bar.update()

        finished = step == last or stopping
        if leader and (step % settings["log_interval"] == 0 or finished):
            seconds = (time.perf_counter() - started) / (step - logged)
            mfu = flops * per_step / seconds / (peak * ranks.size) if peak else None
            log.write(step=step, loss=loss, lr=lr, grad_norm=norm, ms=seconds * 1e3, tokens_per_s=per_step / seconds,
                      mfu=mfu)
            bar.set_postfix_str(f"loss {loss:.3f}")
            tqdm.write(f"step {step:>6}/{settings['max_steps']}  loss {loss:.4f}  lr {lr:.2e}  norm {norm:.2f}  "
                       f"{seconds * 1e3:.0f} ms  {per_step / seconds:,.0f} tokens/s  "
                       + (f"MFU {mfu:.0%}  " if mfu else "") + f"ETA {tqdm.format_interval(seconds * (last - step))}")
            logged, started = step, time.perf_counter()
        if step % settings["eval_interval"] == 0 or finished:
            began, val = time.perf_counter(), None
            if not stopping or step == last:  # who sends a signal may not wait for a validation
                val = validation_loss(model, held_out, settings, ranks, autocast)
            if not math.isfinite(val or 0) or not all(p.isfinite().all() for p in model.parameters()):
                raise diverged(f"step {step}: validation loss {val}, or a weight not finite", path, settings)
            if leader and val is not None:
                log.write(step=step, val=val, perplexity=math.exp(min(val, 700)))
                tqdm.write(f"step {step:>6}  validation loss {val:.4f}, perplexity {math.exp(min(val, 700)):.3f}")
            if leader:
                save_checkpoint(path, model, optimizer, step, settings, shards.meta)
            started += time.perf_counter() - began  # the next line's ms are of training alone

    bar.close()
    if leader:
        if step == first and not checkpoint:
            save_checkpoint(path, model, optimizer, step, settings, shards.meta)
        tqdm.write(f"{path} is at step {step}" + ("; stopped by a signal, go on with --resume" if step < last else ""))
    ranks.sum([0])  # they meet: nobody takes the connections down while the first rank still saves


def diverged(what, path, settings):
    kept = f"{path} keeps an earlier step" if os.path.exists(path) else "no checkpoint had been saved"
    return FloatingPointError(f"{what}; nothing of it was saved, {kept}; try a smaller --lr than {settings['lr']}")


@program
def main(argv=None):
    settings, given = parse(argv)
    try:
        train(settings, given, Ranks(settings["device"]))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
