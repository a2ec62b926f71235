"""A GPT whose notion of position is chosen by name. Pre-LayerNorm, GELU, biases on, head not tied to the embedding.

There is no maximum length: block_size is the *training* length, and any other can be fed. To sample from a checkpoint:

    python model.py out/demo-accrot_qkv/ckpt.pt --prompt="def main("
"""
import math, os, pickle, re, shutil, struct, sys, time, zipfile, zlib
from collections import OrderedDict
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from attention import Attention, Cache, precise, product_type
from checks import CheckpointError, Parser, UsageError, count, integer, misfit, number, program
from positional import check_position, make_position
from prepare_data import get_tokenizer


@dataclass
class GPTConfig:
    """What a model is. Every field is checked on creation: UsageError names the option and what is legal."""
    pos: str = "accrot_qkv"       # mechanism: a name of positional.POSITIONS, then any of +alibi +fox +logn +nope +conv +floor
    angles: str = "token"         # where accrot's angles come from: token, table or hidden
    value_route: str = "shared"   # values travel the queries' route, or one of their "own"
    block_size: int = 512         # tokens: the training length
    vocab_size: int = 50257       # ids the tokenizer can produce
    n_layer: int = 16
    n_head: int = 8
    n_embd: int = 768
    dropout: float = 0.1          # on the embedding and on each residual branch; not on attention weights
    seed: int = 1337              # initial weights, and randrot's steps

    def __post_init__(self):
        for name in ("pos", "angles", "value_route"):
            if type(getattr(self, name)) is not str:
                raise UsageError(f"{name}={getattr(self, name)!r}: give a name")
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            value = getattr(self, name)
            if not count(value) or value < 1:
                raise UsageError(f"{name}={value!r}: give a whole number from 1")
        if type(self.seed) is not int or not 0 <= self.seed < 2 ** 32:
            raise UsageError(f"seed={self.seed!r}: give a whole number from 0 to 2^32 - 1")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise UsageError(f"dropout={self.dropout!r}: give a number from 0 to below 1")
        if self.n_embd % self.n_head:
            raise UsageError(f"n_head={self.n_head}: must divide n_embd={self.n_embd}")
        if self.n_weights > 2 ** 37:
            raise UsageError(f"n_layer={self.n_layer}, n_embd={self.n_embd}, vocab_size={self.vocab_size}: would be "
                             f"{self.n_weights:.1e} weights; at most 1.4e11 are possible")
        check_position(self)

    @property
    def n_weights(self):
        """Weights of the matrices that every mechanism has: of attention and MLP, embedding and head."""
        return 12 * self.n_layer * self.n_embd ** 2 + 2 * self.padded_vocab_size * self.n_embd

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self):
        return -(-self.vocab_size // 64) * 64  # matrix kernels like multiples of 64


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        width = config.n_embd
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(config, make_position(config, layer))
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(OrderedDict(
            fc=nn.Linear(width, 4 * width), gelu=nn.GELU(), proj=nn.Linear(4 * width, width)))
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, embedding, idx, sequence, cache=None):
        x = x + self.drop(self.attention(self.norm_1(x), embedding, idx, sequence, cache))
        return x + self.drop(self.mlp(self.norm_2(x)))


class TokenLosses(torch.autograd.Function):
    """Cross entropy of every row of x (N, C), logits x weight^T (N, V), against targets (N,). The logits are a step's
    largest array, so their gradient overwrites them, a few rows at a time: autograd would fill four such arrays more, 5%
    of a bf16 step on CPU and 11 GB for 16,384 tokens."""
    @staticmethod
    def forward(ctx, x, weight, targets):
        logits, losses = F.linear(x, weight), []
        rows = max(1, 2 ** (26 if x.is_cuda else 22) // len(weight))      # on CPU what a cache holds
        for part, target in zip(logits.split(rows), targets.split(rows)):
            log_p = precise(part).log_softmax(-1)
            losses.append(-log_p.gather(-1, target[:, None])[:, 0])
            slope = log_p.exp_()                                          # softmax, less 1 at the target
            slope.scatter_add_(-1, target[:, None], -torch.ones_like(target[:, None], dtype=slope.dtype))
            part.copy_(slope)
        ctx.save_for_backward(x, weight, logits)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, by_loss):
        x, weight, slope = ctx.saved_tensors
        by_loss = by_loss[:, None]
        return (slope @ weight * by_loss).to(x.dtype), slope.mT @ (x * by_loss).to(x.dtype), None


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """GPT-2's: normal(0.02), residual projections smaller by sqrt(2 n_layer), biases 0. Mechanisms initialise their
        own parameters, so every mechanism starts from the same weights for the same seed."""
        generator = torch.Generator().manual_seed(self.config.seed)
        for name, p in self.named_parameters():
            if ".position." in name or "norm" in name:
                continue
            if name.endswith("bias"):
                p.zero_()
            else:
                p.normal_(0, 0.02 / math.sqrt(2 * self.config.n_layer) if "proj" in name else 0.02, generator=generator)

    def forward(self, idx, targets=None, sequence=None, reduction="mean", caches=None):
        """idx: (B, T) int64 token ids, any T. Returns (logits, loss).

        Without targets: logits (B, T, padded vocabulary) at every position, and None. With targets (B, T) int64, already
        aligned (targets[b, t] follows idx[b, t]; nothing is shifted here): None, and the mean loss in nats, or the loss
        of every token (B, T) with reduction="none". `sequence`: (B,) int64, which random steps randrot takes
        (0 ... B-1 if not given). `caches`: one attention.Cache a layer, for decoding."""
        x = self.hidden(idx, sequence, caches)
        if targets is None:
            return self.head(x), None
        losses = self.losses(x.flatten(0, 1), targets.flatten())
        return None, losses.view(targets.shape) if reduction == "none" else losses.mean()

    def enter(self, idx):
        """What the first layer reads, and what tells every layer a token alone: its embedding, normalised. (B, T, C) each."""
        embedding = self.embed(idx)
        return self.drop(embedding), F.layer_norm(precise(embedding), embedding.shape[-1:])

    def hidden(self, idx, sequence=None, caches=None):
        """What the head reads, (B, T, C); arguments as in forward."""
        if sequence is None:
            sequence = torch.arange(idx.size(0), device=idx.device)
        x, embedding = self.enter(idx)
        for layer, block in enumerate(self.blocks):
            x = block(x, embedding, idx, sequence, caches and caches[layer])
        return self.norm(x)

    def losses(self, x, targets):
        """Cross entropy of every row of x (N, C) against targets (N,), in float32 or better. 65,536 x 50,304 logits would
        be 13 GB and pass 2^31 elements, so where no gradient is wanted they are made a slice of rows at a time."""
        dtype = product_type(x)
        x, weight = x.to(dtype), self.head.weight.to(dtype)
        if torch.is_grad_enabled():
            return TokenLosses.apply(x, weight, targets)
        rows = max(1, 2 ** 24 // self.config.padded_vocab_size)
        return torch.cat([F.cross_entropy(precise(F.linear(x[i:i + rows], weight)), targets[i:i + rows],
                                          reduction="none") for i in range(0, len(x), rows)])

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Append max_new_tokens sampled ids to idx (B, T). temperature 0 takes the likeliest. Keys and values are cached
        in the common frame; the result equals recomputing the whole sequence for each token."""
        if idx.size(1) == 0 or max_new_tokens < 0 or temperature < 0:
            raise ValueError("generate needs a prompt of at least one token, max_new_tokens >= 0 and temperature >= 0")
        caches = [Cache(idx.size(1) + max_new_tokens) for _ in self.blocks]
        new = idx
        for _ in range(max_new_tokens):
            logits = self.head(self.hidden(new, caches=caches)[:, -1])                        # not of the whole prompt
            logits = logits[:, :self.config.vocab_size].float()                               # padding is never sampled
            if top_k is not None:
                least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < least, float("-inf"))
            if temperature < 1e-6:  # 0, or so small that the division would overflow
                new = logits.argmax(-1, keepdim=True)
            else:
                new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            idx = torch.cat((idx, new), dim=1)
        return idx

    def flops_per_token(self, length):
        """Floating-point operations of one training step per token: 6 per weight in a matrix product (the embedding is a
        look-up), 12 per layer, channel and token of context (PaLM, arXiv 2204.02311, appendix B; causality not deducted).
        With train.py --cross_batch an open layer's context is all sequences that it reads as one."""
        look_ups = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Embedding))
        weights = sum(p.numel() for p in self.parameters()) - look_ups
        return 6 * weights + 12 * self.config.n_embd * sum(block.attention.position.context(length) for block in self.blocks)

    @classmethod
    def from_checkpoint(cls, path, device="cpu"):
        """The model of a checkpoint that train.py wrote, in eval mode, with the checkpoint's other entries (step, data,
        train) as model.checkpoint. CheckpointError says what is wrong."""
        checkpoint = read_checkpoint(path)
        model = cls(GPTConfig(**checkpoint["config"]))
        model.load_weights(checkpoint["model"], path)
        model.checkpoint = {key: value for key, value in checkpoint.items() if key not in ("model", "optimizer")}
        return model.to(device).eval()

    def load_weights(self, weights, path, missing_ok=lambda name: False):
        """Copy `weights` in, strictly: names and shapes must be this model's, but for names where missing_ok(name)."""
        # DDP and torch.compile wrap names, in either order
        weights = {re.sub(r"^(module\.|_orig_mod\.)+", "", name): value for name, value in weights.items()}
        own = self.state_dict()
        missing = [name for name in own if name not in weights and not missing_ok(name)]
        unknown = [name for name in weights if name not in own]
        wrong = [f"{name} {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
                 for name in own if name in weights and weights[name].shape != own[name].shape]
        if missing or unknown or wrong:
            raise CheckpointError(f"{path}: weights do not fit a model with pos={self.config.pos}; missing: "
                                  f"{', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}; "
                                  f"of another shape: {', '.join(wrong) or 'none'}")
        self.load_state_dict(weights, strict=False)


def device_of(wanted="auto"):
    """The device that was asked for: cuda, mps, cpu, or auto, the first of these that is there. UsageError if it is not.

    Call it before anything is computed: from then on float32 numbers below 1e-38, such as a bias leaves of far keys, are 0.
    Processors of Intel are many times slower with them: FoX at 16,384 tokens takes a third of the time without."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(filter(there.get, there)) if wanted == "auto" else wanted
    if not there.get(kind):
        raise UsageError(f"device={kind}: use auto, cpu, or cuda or mps on a machine that has it")
    torch.set_flush_denormal(True)                        # for this thread and those that it starts
    return torch.device(kind)


def check_compiler(device):
    """UsageError where torch.compile would find no compiler."""
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise UsageError("compile=true: torch.compile needs a C++ compiler on CPU; install g++ or leave it out")


def autocast_for(device, dtype):
    """A function that makes the context to compute in: bfloat16 autocast, for auto on CUDA only, or float32."""
    low = dtype == "bfloat16" or (dtype == "auto" and device.type == "cuda")
    if low and device.type == "mps":
        raise UsageError("dtype=bfloat16: not used on MPS; use --dtype=float32")
    if low and device.type == "cpu" and not (torch.backends.mkldnn.is_available()
                                             and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        print("note: bfloat16 is emulated on this processor, and many times slower than --dtype=float32", file=sys.stderr)
    return partial(torch.autocast, device.type, torch.bfloat16, enabled=low)


def read_checkpoint(path):
    """The dict that train.py saved, tensors mapped from the file. Nothing in it is executed, and all of it is judged: first
    by the file's checksums (of which PyTorch takes no notice: 1 s per GB), then by what each entry must be."""
    try:
        with zipfile.ZipFile(path) as file:
            if spoilt := file.testzip():
                raise ValueError(f"{spoilt} differs from its checksum")
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such checkpoint; train one with: python train.py --config=demo") from None
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError, pickle.UnpicklingError,
            zipfile.BadZipFile, zlib.error, struct.error) as error:  # what unpickling and unzipping nonsense can raise
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{path}: not a whole checkpoint of train.py ({why})") from None
    if wrong := misfit(checkpoint, CHECKPOINT) or misfit(checkpoint, {"train": is_settings}):
        raise CheckpointError(f"{path}: not a checkpoint of train.py: {wrong}")
    checkpoint["train"].setdefault("cross_batch", 1)      # a knob that older checkpoints have not
    try:
        config = GPTConfig(**checkpoint["config"])
    except (UsageError, TypeError) as error:              # TypeError: a field that this code has not
        raise CheckpointError(f"{path}: {error}") from None
    if sum(value.numel() for value in checkpoint["model"].values()) < config.n_weights:  # before memory is taken for them
        raise CheckpointError(f"{path}: weights do not fit: fewer than a model of its shape has; some are missing")
    return checkpoint


def is_weights(value):
    return isinstance(value, dict) and all(isinstance(name, str) and isinstance(weight, torch.Tensor)
                                           and weight.is_floating_point() for name, weight in value.items())


def is_settings(value):
    return all(isinstance(name, str) and isinstance(setting, (str, int, float)) for name, setting in value.items())


CHECKPOINT = {"config": {field.name: object for field in fields(GPTConfig)}, "model": is_weights, "step": count,
              "train": {"data": str}, "data": {"tokenizer": str, "vocab_size": count, "shards": dict}}


@program
def main(argv=None):
    parser = Parser("Sample text from a checkpoint.")
    parser.add_argument("checkpoint", help="a ckpt.pt written by train.py")
    parser.add_argument("--prompt", default="\n", help="text to continue")
    parser.add_argument("--tokens", type=integer(1, 10 ** 6), default=200, help="how many to sample (200)")
    parser.add_argument("--temperature", type=number(0, 1e6), default=0.8, help="0 takes the likeliest token (0.8)")
    parser.add_argument("--top_k", type=integer(1), default=200, help="sample among so many likeliest tokens (200)")
    parser.add_argument("--seed", type=integer(0), default=1337, help="of the sampling (1337)")
    args = parser.parse_args(argv)
    device = device_of()
    model = GPT.from_checkpoint(args.checkpoint, device)
    tokenizer = get_tokenizer(model.checkpoint["data"]["tokenizer"])
    if tokenizer.n_vocab != model.config.vocab_size:
        raise CheckpointError(f"{args.checkpoint}: vocab_size={model.config.vocab_size}, but its tokenizer "
                              f"{tokenizer.name} has {tokenizer.n_vocab}")
    ids = tokenizer.encode_ordinary(args.prompt) or [tokenizer.eot_token]
    generator = torch.Generator(device).manual_seed(args.seed)
    started = time.perf_counter()
    out = model.generate(torch.tensor([ids], device=device), args.tokens, args.temperature, args.top_k, generator)
    print(tokenizer.decode(out[0].tolist()))
    print(f"[{args.tokens / (time.perf_counter() - started):.0f} tokens/s]", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
