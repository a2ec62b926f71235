"""Text in, token shards out, and the reader of those shards.

    python prepare_data.py --dataset=stdlib --tokenizer=bytes         # the demo: 12 MB of text, no download, a second
    python prepare_data.py                                            # OpenWebText with GPT-2's tokens
    python prepare_data.py --dataset='books/*.txt' --out=data/books   # your own *.txt, *.jsonl or *.parquet

OpenWebText: 8.0e6 documents, 24 GB of Parquet to download, 40 GB of text, 9.0e9 tokens in 18 GB of shards.
A shard is 256 little-endian int32 (magic, version, number of tokens, zeros) and then the tokens, as in llm.c and
modded-nanogpt. Each document ends with one end-of-text id; the next follows at once, even into the next shard.
meta.json says what the tokens are. It is written last, so a directory without it is unfinished.
"""
import collections, functools, hashlib, json, multiprocessing, os, re, shutil, signal, sys, threading, time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from checks import DataError, Parser, count, integer, number, program, read_json, whole, write_json

HEADER = 256                                              # int32 words before the first token
FORMATS = {"<u2": (20240520, 1), "<u4": (20240801, 7)}    # token type: (magic, version); both are llm.c's
SPLITS = ("train", "val")
SPLIT_RULE = "val if BLAKE2b-64 of the document's UTF-8 text, as a big-endian fraction of 2^64, is below val_fraction"
SUFFIXES = (".txt", ".jsonl", ".parquet")
TOKENIZERS = ("gpt2", "bytes")
SHARD = re.compile(r"(train|val)_\d{6,}\.bin")            # no other name is read, so none outside the directory
META = {"tokenizer": str, "vocab_size": count, "eot": count, "source": str, "arguments": dict,  # what meta.json says
        "documents": dict.fromkeys(SPLITS, count), "tokens": dict.fromkeys(SPLITS, count),
        "shards": dict.fromkeys(SPLITS, [{"file": lambda name: isinstance(name, str) and SHARD.fullmatch(name),
                                          "tokens": count, "sha256": str}])}
PIECE = 1 << 18                                           # characters given to the tokenizer at once, bytes to a worker
# A longer text is cut before the last blank that follows a non-blank. No match of GPT-2's pattern spans such a place,
# none looks back, so each side gives the tokens it gives in the whole text. Only a run without one (a symbol a million
# times, a base64 blob) is cut anywhere, group 1: tiktoken's regex gives up on 1e6 blanks.
CUT = re.compile(rf"(?s).{{1,{PIECE}}}\Z|.{{0,{PIECE - 1}}}\S(?=[ \n])|(.{{1,{PIECE}}})")


def read_meta(directory):
    """The dict in a prepared directory's meta.json. DataError, with the command to type, if there is none."""
    path = Path(directory) / "meta.json"
    try:
        return read_json(path, META)
    except (OSError, ValueError) as error:
        what = "" if path.parent.name == "openwebtext" else " --dataset=stdlib --tokenizer=bytes"
        raise DataError(f"{directory} has no finished data (meta.json: {error}); type: python prepare_data.py{what} "
                        f"--out={directory}{' --overwrite' * path.exists()}") from None


class TokenShards:
    """One split ("train" or "val") of a prepared directory as one long row of tokens. DataError names what is wrong.
    Every read goes to the file, because a memory map's pages would count as this process's memory."""
    def __init__(self, directory, split):
        self.meta = read_meta(directory)
        self.vocab_size = self.meta["vocab_size"]
        self.shards, self.starts = [], [0]                # (path, token type); where each begins in the long row
        for shard in self.meta["shards"][split]:
            path, count = Path(directory) / shard["file"], shard["tokens"]
            header = np.fromfile(path, "<i4", HEADER).tolist() if path.is_file() else []
            dtype = next((np.dtype(t) for t, begin in FORMATS.items() if header[:3] == [*begin, count]), None)
            if dtype is None or path.stat().st_size != 4 * HEADER + count * dtype.itemsize:
                raise DataError(f"{path} is missing, cut short or no shard of {count} tokens (it begins {header[:3]}); "
                                f"prepare {directory} again with --overwrite")
            self.shards.append((path, dtype))
            self.starts.append(self.starts[-1] + count)
        if not len(self):
            raise DataError(f"{directory} has no {split} tokens; prepare it again with another --val_fraction, "
                            f"{'above' if split == 'val' else 'below'} {self.meta['arguments'].get('val_fraction')}, and "
                            f"from several documents, as each is on one side only")

    def __len__(self):
        return self.starts[-1]

    def read(self, start, count):
        """Tokens start ... start + count - 1 -> int64 (count,). IndexError beyond the ends, DataError for wrong ids."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)}")
        parts = [np.empty(0, np.int64)]
        for (path, dtype), first, last in zip(self.shards, self.starts, self.starts[1:]):
            skip, take = max(0, start - first), min(last, start + count) - max(first, start)
            if take > 0:
                parts.append(np.fromfile(path, dtype, take, offset=4 * HEADER + skip * dtype.itemsize))
                if len(parts[-1]) < take or parts[-1].max() >= self.vocab_size:
                    raise DataError(f"{path}: near token {skip} it ends, or has an id outside the vocabulary of "
                                    f"{self.vocab_size}; type: python prepare_data.py --verify --out={path.parent}")
        return np.concatenate(parts, dtype=np.int64)

    def rows(self, starts, count):
        """read(start, count) of each start -> int64 (len(starts), count)."""
        return np.stack([self.read(start, count) for start in starts])


def get_tokenizer(name):
    """The tiktoken.Encoding "gpt2", or "bytes" (ids 0-255, and 256 for end-of-text). DataError if it can't be had."""
    import tiktoken
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    if name not in TOKENIZERS:
        raise DataError(f"tokenizer={name}: use one of {', '.join(TOKENIZERS)}")
    found = ["no answer in 25 s"]
    def load():
        try:
            found[0] = tiktoken.get_encoding(name)
        except Exception as error:
            found[0] = type(error).__name__
    thread = threading.Thread(target=load, daemon=True)   # tiktoken's download has no time limit of its own
    thread.start()
    thread.join(25)
    if isinstance(found[0], str):
        raise DataError(f"--tokenizer={name}: its vocabulary is not cached and cannot be downloaded ({found[0]}); set "
                        f"TIKTOKEN_CACHE_DIR to a directory where tiktoken has stored it, or type --tokenizer=bytes")
    return found[0]


def text_of(name, line, raw, column):
    """Raw bytes -> (text, its UTF-8, whether U+FFFD had to replace what is no text)."""
    fields = None
    try:
        text = raw.decode(errors="surrogateescape")       # bytes that are not UTF-8 become lone surrogates
        if name.endswith(".jsonl"):
            fields = json.loads(text)
            text = fields[column] + ""                    # a TypeError unless it is a text
        return text, text.encode(), False
    except UnicodeEncodeError:                            # JSON can spell a lone surrogate too; UTF-8 has none
        text = re.sub("[\ud800-\udfff]", "\ufffd", text)
        return text, text.encode(), True
    except (AttributeError, ValueError, LookupError, TypeError, RecursionError) as error:
        columns = list(fields)[:20] if isinstance(fields, dict) else "a key, if each line is a JSON object"
        raise DataError(f"{name}, row {line}: no text in column {column!r} ({type(error).__name__}: {error}); "
                        f"--text_column can be {columns}") from None


def start_worker():
    """End with the parent: one that is killed cannot end its workers, and they would wait for ever."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode_batch(args, dtype, eot, batch):
    """(file, [(line, raw bytes)]) -> ({split: its tokens, in order}, counts of what was done)."""
    name, rows = batch
    counts, parts = collections.Counter(read=len(rows)), {split: [] for split in SPLITS}
    tokenizer = None if args.tokenizer == "bytes" else get_tokenizer(args.tokenizer)
    for line, raw in rows:
        text, utf8, mended = text_of(name, line, raw, args.text_column)
        pieces = list(CUT.finditer(text)) if tokenizer else []    # no special tokens: a text may mention the marker
        tokens = [tokenizer.encode_to_numpy(piece[0], disallowed_special=()) for piece in pieces]
        tokens = tokens or [np.frombuffer(utf8, np.uint8)]
        if sum(map(len, tokens)) < args.min_doc_tokens:   # which is 1 or more
            counts["short_dropped" if text else "empty_dropped"] += 1
            continue
        fraction = int.from_bytes(hashlib.blake2b(utf8, digest_size=8).digest(), "big") / 2**64
        split = "val" if fraction < args.val_fraction else "train"
        parts[split] += [*tokens, np.array([eot])]
        counts.update({split: 1, "mended": mended, "run_cut": any(piece[1] for piece in pieces)})
    return {split: np.concatenate(p, dtype=dtype, casting="unsafe") for split, p in parts.items() if p}, counts


def map_in_processes(function, items, num_proc):
    """Yield function(item) of each item, in order. What is under way is bounded, and so is memory."""
    with ProcessPoolExecutor(num_proc, multiprocessing.get_context("spawn"), start_worker) as pool:
        waiting = collections.deque()
        for item in items:
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the workers inherit it: Ctrl-C is for the parent
            waiting.append(pool.submit(function, item))
            signal.signal(signal.SIGINT, handler)
            if len(waiting) > 3 * num_proc:
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)


def local_files(dataset):
    """stdlib, a path, a glob, or a directory with all below it -> [(path, bytes)], sorted; None for a hub id."""
    with suppress(ValueError, RuntimeError):              # a ** that is no whole name; a ~ of no user
        given, legal, skip = Path(dataset).expanduser(), SUFFIXES, set()
        if dataset == "stdlib":
            given, legal = Path(os.__file__).parent, (".py",)
            skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        if given.is_dir():
            found = [p for p in given.rglob("*") if p.suffix in legal and not skip & set(p.relative_to(given).parts)]
        elif re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", dataset) and given.suffix not in legal and not given.exists():
            return None
        else:
            found = [given] if given.exists() else list(Path(given.anchor).glob(str(given.relative_to(given.anchor))))
        found = [p for p in found if not p.is_dir()]      # as Spark's name.parquet/, whose files are found themselves
        if found and all(p.suffix in legal for p in found):
            return [(str(p), p.stat().st_size) for p in sorted(found)]
    raise DataError(f"--dataset={dataset}: no file, or one of another kind than {', '.join(SUFFIXES)}; legal are "
                    f"paths, quoted globs and directories of these, stdlib, and hub ids")


def hub_files(repo, revision, limit):
    """A hub dataset's train split -> [(file, bytes)], function from file to path, its name, [(cache, bytes to load)]."""
    try:
        import datasets
        from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
        # Asked first because it fails at once without a network, where load_dataset_builder retries for 23 s.
        info = HfApi().dataset_info(repo, revision=revision, files_metadata=True, timeout=10)
        builder = datasets.load_dataset_builder(repo, revision=info.sha)
    except Exception as error:                            # of many kinds, which mean the same here
        raise DataError(f"--dataset={repo}: no file here, and not to be had from the hub ({type(error).__name__}: "
                        f"{str(error)[:150]}); if it has no Parquet, try --revision=refs/convert/parquet") from None
    sizes = {file.rfilename: file.size for file in info.siblings}
    names = [url.split(f"@{info.sha}/")[-1] for url in (builder.config.data_files or {}).get("train", [])]
    if not names or not all(name in sizes and name.endswith(".parquet") for name in names):
        raise DataError(f"--dataset={repo}: no Parquet files of a train split; try --revision=refs/convert/parquet")
    # The hub's own conversion stops after 5 GB of a large dataset and says so in its folder names only.
    if not limit and any(re.search(r"(^|/)partial[-/]", name) for name in names):
        raise DataError(f"--dataset={repo}: revision {revision} is only a part of it; give another, or --limit_docs")
    missing = sum(sizes[name] for name in names if not try_to_load_from_cache(repo, name, None, info.sha, "dataset"))
    return ([(name, sizes[name]) for name in names],
            lambda name: hf_hub_download(repo, name, revision=info.sha, repo_type="dataset"),
            f"{repo} at {info.sha}", [(constants.HF_HUB_CACHE, missing)])


def read_batches(files, fetch, column, limit, progress):
    """Yield (file, [(line, raw bytes)]), raw a line of JSON or a text, and `limit` of them in all unless it is None."""
    for name, size in files:
        try:
            path = fetch(name)
        except Exception as error:                        # the hub's library has many kinds
            raise DataError(f"{name}: download broken off ({error}); the same command takes it up again") from None
        for used, batch in read_file(name, path, size, column):
            yield name, batch[:limit]
            progress.update(used)
            if limit is not None and (limit := limit - len(batch)) <= 0:
                return


def read_file(name, path, size, column):
    """Yield (bytes of the file used up, [(line, raw bytes)])."""
    start, columns = 1, "none: it is no Parquet file"
    if name.endswith(".jsonl"):
        with open(path, "rb") as file:
            while lines := file.readlines(PIECE):
                yield sum(map(len, lines)), [(i, line) for i, line in enumerate(lines, start) if line.strip()]
                start += len(lines)
    elif name.endswith(".parquet"):
        import pyarrow.parquet
        try:
            file = pyarrow.parquet.ParquetFile(path)
            columns = file.schema_arrow.names[:20]
            for batch in file.iter_batches(64, columns=[column]):
                raws = batch[column].cast(pyarrow.large_binary()).to_pylist()    # bytes: a worker mends bad UTF-8
                yield size * len(raws) / file.metadata.num_rows, list(enumerate(raws, start))
                start += len(raws)
        except (pyarrow.ArrowException, KeyError, OSError, UnicodeError) as error:
            raise DataError(f"{name}: no text in column {column!r} ({error}); --text_column can be {columns}") from None
    else:
        yield size, [(1, Path(path).read_bytes())]


def append(tokens, start, out, split, shard_tokens):
    """Write a split's tokens from number `start` on, under temporary names, headers still empty -> the next number."""
    while len(tokens):
        shard, at = divmod(start, shard_tokens)
        now, tokens = np.split(tokens, [shard_tokens - at])
        with open(out / f"{split}_{shard:06d}.bin.tmp", "ab") as file:
            file.write(b"" if at else bytes(4 * HEADER))
            file.write(now)
        start += len(now)
    return start


def seal(path, dtype, count):
    """Give a shard of `count` tokens its header and, when all is on the disk, its name -> what meta.json says of it."""
    with whole(path, "r+b") as file:                      # goes on with what append has written
        if os.path.getsize(file.name) != 4 * HEADER + count * np.dtype(dtype).itemsize:
            raise DataError(f"{path}: another run writes it too; prepare {path.parent} again, by one run")
        file.write(np.array([*FORMATS[dtype], count], "<i4"))
    return {"file": path.name, "tokens": count, "sha256": sha256(path)}


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def clear(out, suffix=""):
    """Remove what a run has finished, or with suffix ".tmp" has not. meta.json goes first: without it all is unfinished."""
    for path in sorted(out.iterdir()):
        if re.fullmatch(rf"(meta\.json|{SHARD.pattern}){re.escape(suffix)}", path.name):
            path.unlink()


def check_disk(needs):
    """Say what will be written, [(directory, bytes)]. DataError if a file system lacks the room."""
    def amount(size):
        return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
    print("needs about " + " and ".join(f"{amount(size)} in {path}" for path, size in needs), flush=True)
    wanted = collections.Counter()                        # per file system
    for path, size in needs:
        place = next(p for p in (Path(path).absolute(), *Path(path).absolute().parents) if p.exists())
        wanted[place.stat().st_dev] += size
        need, free = wanted[place.stat().st_dev], shutil.disk_usage(place).free
        if free < need:
            raise DataError(f"{path}: {amount(need)} needed, {amount(free)} free; make room, or change --out or HF_HOME")


def prepare(args):
    """Do what the command line says, or raise DataError or OSError."""
    from tqdm import tqdm
    out, started = Path(args.out), time.perf_counter()
    files, fetch, downloads = local_files(args.dataset), str, []
    local = files is not None
    if args.val_fraction is None:
        args.val_fraction = 0.1 if local else 0.0005
    # All that the shards' bytes depend on: every flag but four, and the input.
    arguments = {k: v for k, v in vars(args).items() if k not in ("out", "num_proc", "overwrite", "verify")}
    arguments["input"] = f"{len(files)} files, {sum(size for _, size in files)} bytes" if local else args.revision
    source = f"{args.dataset}: {arguments['input']} (Python {sys.version.split()[0]})"
    if (out / "meta.json").exists() and not args.overwrite:
        old = read_meta(out)["arguments"]
        if changed := ", ".join(f"{k} was {old.get(k)}, is {v}" for k, v in arguments.items() if old.get(k) != v):
            raise DataError(f"{out} holds data made otherwise ({changed}); give another --out, or add --overwrite")
        print(f"{out} is finished already, with these very arguments and as many bytes (--overwrite makes it anew)")
        return

    tokenizer, counts, written = get_tokenizer(args.tokenizer), collections.Counter(), dict.fromkeys(SPLITS, 0)
    if not local:
        files, fetch, source, downloads = hub_files(args.dataset, args.revision, args.limit_docs)
    if not args.limit_docs:                               # with a limit, nothing is known beforehand
        text = sum(size * (1.65 if name.endswith(".parquet") else 1) for name, size in files)
        # GPT-2's tokens take 0.45 bytes per byte of English, 0.9 per byte of source code.
        check_disk(downloads + [(out, text * (2 if args.tokenizer == "bytes" else 0.9 if local else 0.45))])
    total = sum(size for _, size in files)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    num_proc = args.num_proc or min(cores, 1 + total // 2**24)    # less than 16 MB each is done before workers start
    dtype = "<u2" if tokenizer.n_vocab <= 1 << 16 else "<u4"
    encode = functools.partial(encode_batch, args, dtype, tokenizer.eot_token)
    out.mkdir(parents=True, exist_ok=True)
    meta_path, begun = out / "meta.json", out / "meta.json.tmp"   # the latter from now on, until it becomes the former
    if not (meta_path.exists() or begun.exists() or args.overwrite) and any(SHARD.fullmatch(p.name) for p in out.iterdir()):
        raise DataError(f"{out} holds shards that no run of this program left; give another --out, or add --overwrite")
    clear(out, ".tmp")
    begun.touch()
    try:
        with tqdm(total=None if args.limit_docs else total, unit="B", unit_scale=True, disable=None) as progress:
            batches = read_batches(files, fetch, args.text_column, args.limit_docs, progress)
            for tokens, done in map(encode, batches) if num_proc == 1 else map_in_processes(encode, batches, num_proc):
                counts.update(done)
                for split in tokens:
                    written[split] = append(tokens[split], written[split], out, split, args.shard_tokens)
        if not any(written.values()):
            raise DataError(f"--dataset={args.dataset}: no document is left to write ({dict(counts)}); "
                            f"--min_doc_tokens={args.min_doc_tokens} may be too many")
        clear(out)                                        # what --overwrite replaces, now that nothing is missing
        shards = {split: [] for split in SPLITS}
        starts = [(split, i) for split, n in written.items() for i in range(0, n, args.shard_tokens)]
        for split, i in tqdm(starts, desc="checksums", unit="shard", disable=None, leave=False):
            name, n = f"{split}_{i // args.shard_tokens:06d}.bin", min(written[split] - i, args.shard_tokens)
            shards[split].append(seal(out / name, dtype, n))
        meta = dict(tokenizer=args.tokenizer, vocab_size=tokenizer.n_vocab, eot=tokenizer.eot_token, source=source,
                    split_rule=SPLIT_RULE, documents={split: counts[split] for split in SPLITS}, tokens=written,
                    handled={k: counts[k] for k in ("read", "empty_dropped", "short_dropped", "mended", "run_cut")},
                    shards=shards, arguments=arguments)
        write_json(meta_path, meta)
    except BaseException:
        clear(out, ".tmp")
        if not meta_path.exists():
            clear(out)
        raise
    seconds, n_tokens = time.perf_counter() - started, sum(written.values())
    for split in SPLITS:
        print(f"{split}: {counts[split]:,} documents, {written[split]:,} tokens")
    print("{read:,} documents read; dropped {empty_dropped:,} empty and {short_dropped:,} too short; replaced what is no "
          "text in {mended:,}; cut a very long run without blanks in {run_cut:,}".format(**meta["handled"]))
    for split in [split for split in SPLITS if not counts[split]]:
        print(f"note: no document is in {split}, and train.py needs both sides. A document is on one side only: give "
              f"more of them (a file or a line of .jsonl each), or another --val_fraction")
    print(f"{out} is ready, after {seconds:.1f} s, {n_tokens / seconds:,.0f} tokens/s with --num_proc={num_proc}")


def verify(args):
    """Compare each shard with its checksum -> exit status 0, or 1 after naming those that differ."""
    shards = {Path(args.out) / s["file"]: s["sha256"] for split in SPLITS for s in read_meta(args.out)["shards"][split]}
    bad = [path for path, digest in shards.items() if not path.is_file() or sha256(path) != digest]
    print("\n".join(f"{path} differs from its checksum" for path in bad) or f"{args.out}: all as it was written")
    return int(bool(bad))


@program
def main(argv=None):
    parser = Parser(__doc__, usage="python prepare_data.py [--key=value ...]")
    add = parser.add_argument
    add("--dataset", default="Skylion007/openwebtext", help="hub id (default %(default)s); path, quoted glob or "
        "directory of *.txt (a document each), *.jsonl or *.parquet; or stdlib, the source of Python's own library")
    add("--revision", default="main", help="branch or commit of a hub dataset (default main)")
    add("--text_column", default="text", help="the column of *.jsonl and *.parquet to take (default text)")
    add("--tokenizer", default="gpt2", choices=TOKENIZERS, help="gpt2, 50,257 ids (default), or bytes, 257 ids")
    add("--out", help="directory to write (default: data/ and a name from --dataset, such as data/openwebtext)")
    add("--num_proc", type=integer(1, 1024), help="worker processes; the result is the same (default: what pays)")
    add("--limit_docs", type=integer(1), help="read only so many documents")
    add("--min_doc_tokens", type=integer(1), default=1, help="keep only documents of at least so many tokens")
    add("--val_fraction", type=number(0, 1), help="share of documents for validation, 0 to 1, chosen by a hash of the "
        "text (default: 0.0005 of a hub dataset, 0.1 of local files and stdlib)")
    add("--shard_tokens", type=integer(1, 2**31 - 1), default=10**8, help="tokens in a shard (default 1e8: 200 MB)")
    add("--overwrite", action="store_true", help="replace finished data in --out")
    add("--verify", action="store_true", help="only compare the shards in --out with their checksums; 1 if one differs")
    args = parser.parse_args(argv)
    args.out = args.out or f"data/{re.sub(r'[^a-zA-Z0-9_-]', '', Path(args.dataset).stem) or 'local'}"
    return (verify if args.verify else prepare)(args)


if __name__ == "__main__":
    sys.exit(main())
