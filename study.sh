#!/usr/bin/env bash
# The study of the README, "What we measured": train every row at several seeds, evaluate it, keep what came out.
#
#   ./study.sh                        all that is not yet in results/study, one process per core; stop and go on at will
#   ./study.sh main rope 1            one row: group, name, seed
#   SEEDS="1 2" PARTS="main" ./study.sh   some of it
#
# Rows of "recall" learn to copy random letters, and are asked how far back they can; those of "mixed" learn it beside the text.
# A row ends as NAME-SEED.json (what eval_length.py found) and .log.jsonl (what train.py logged) in results/study/GROUP. What
# it does on long documents alone is in results/study/long; how far its routes reach, in results/study/theory.
# Needs the .venv that `make .venv/base` makes; without a C++ compiler it runs uncompiled, a quarter slower.
set -euo pipefail
cd "$(dirname "$0")"
RUN=.venv/bin/python CORES=${CORES:-$(nproc)} KEEP=results/study
[ -x $RUN ] || { echo "study.sh: no $RUN; make it with: make .venv/base" >&2; exit 2; }
export OMP_NUM_THREADS=1
trap 'exit 130' INT TERM  # else what train.py saved when interrupted would be evaluated as if it were finished
COMPILE=$(command -v g++ >/dev/null && echo --compile || true)
# without instructions for bfloat16 a processor emulates it, fifty times slower
export DTYPE=${DTYPE:-$(grep -qs avx512_bf16 /proc/cpuinfo && echo bfloat16 || echo float32)}

RECALL="--data=data/copies --n_layer=2 --block_size=128 --batch_size=32 --max_steps=3000"
MIXED="${RECALL/copies/mixed} --max_steps=6000"
LARGE="--n_embd=256 --n_head=4 --block_size=512 --batch_size=6 --eval_interval=300"
# group | name | seeds | flags of train.py that differ from the common ones | evaluations besides the plain one
ROWS="
main    | rope              | 3 | --pos=rope                                            | --window=256 --ntk --logn
main    | accrot_qkv        | 3 | --pos=accrot_qkv                                      | --logn --window=256
main    | alibi             | 3 | --pos=alibi                                           |
main    | fox               | 3 | --pos=fox                                             |
main    | accrot_qkv+fox    | 3 | --pos=accrot_qkv+fox                                  | --logn
main    | accrot_qkv+fox+nope | 3 | --pos=accrot_qkv+fox+nope                           | --logn
main    | accrot_qkv+fox+nope-cross | 3 | --pos=accrot_qkv+fox+nope --cross_batch=12  | --logn
main    | accrot_qkv+fox+nope+conv | 3 | --pos=accrot_qkv+fox+nope+conv         | --logn
main    | accrot_qkv+fox+nope+conv-cross | 3 | --pos=accrot_qkv+fox+nope+conv --cross_batch=12 | --logn
main    | accrot_qkv+fox+nope+conv+floor | 3 | --pos=accrot_qkv+fox+nope+conv+floor | --logn
main    | accrot_qk         | 3 | --pos=accrot_qk                                       | --logn
main    | randrot_qk        | 3 | --pos=randrot_qk                                      | --logn
main    | randrot_qkv       | 3 | --pos=randrot_qkv                                     | --logn
main    | randrot_qkv-own   | 3 | --pos=randrot_qkv --value_route=own                   | --logn
main    | rope+fox          | 3 | --pos=rope+fox                                        | --logn
main    | reflect_qkv       | 1 | --pos=reflect_qkv                                     | --logn
main    | reflect_qk        | 1 | --pos=reflect_qk                                      | --logn
main    | orth_qkv          | 1 | --pos=orth_qkv                                        | --logn
main    | path              | 1 | --pos=path                                            | --logn
main    | nope              | 1 | --pos=nope                                            | --logn
main    | rope_qkv          | 1 | --pos=rope_qkv                                        | --logn
main    | accrot_qkv+alibi  | 1 | --pos=accrot_qkv+alibi                                |
main    | path+fox          | 1 | --pos=path+fox                                        |
main    | accrot_qkv+logn   | 1 | --pos=accrot_qkv+logn                                 |
main    | accrot_qkv-hidden | 1 | --pos=accrot_qkv --angles=hidden                      | --logn
main    | accrot_qkv-table  | 1 | --pos=accrot_qkv --angles=table                       | --logn
main    | accrot_qk-hidden  | 1 | --pos=accrot_qk --angles=hidden                       | --logn
main    | accrot_qk-table   | 1 | --pos=accrot_qk --angles=table                        | --logn
main    | accrot_qkv-own    | 1 | --pos=accrot_qkv --value_route=own                    | --logn
context | accrot_qkv-64     | 3 | --pos=accrot_qkv --block_size=64 --batch_size=48      |
context | accrot_qkv-128    | 1 | --pos=accrot_qkv --block_size=128 --batch_size=24     |
context | accrot_qkv-512    | 1 | --pos=accrot_qkv --block_size=512 --batch_size=6      |
warm    | accrot_qk-warm    | 3 | --pos=accrot_qk --init_from=rope --max_steps=600      |
warm    | accrot_qkv-warm   | 3 | --pos=accrot_qkv --init_from=rope_qkv --max_steps=600 |
heads   | randrot_qk-32     | 1 | --pos=randrot_qk --n_head=4                           |
heads   | randrot_qkv-32    | 1 | --pos=randrot_qkv --n_head=4                          |
steps   | randrot_qk-2400   | 1 | --pos=randrot_qk --max_steps=2400                     |
steps   | randrot_qkv-2400  | 1 | --pos=randrot_qkv --max_steps=2400                    |
steps   | accrot_qk-2400    | 1 | --pos=accrot_qk --max_steps=2400                      |
steps   | rope-4800         | 1 | --pos=rope --max_steps=4800                           | --window=256
steps   | alibi-4800        | 1 | --pos=alibi --max_steps=4800                          |
steps   | fox-4800          | 1 | --pos=fox --max_steps=4800                            |
steps   | rope+fox-4800     | 1 | --pos=rope+fox --max_steps=4800                       |
steps   | accrot_qkv+fox-4800 | 3 | --pos=accrot_qkv+fox --max_steps=4800               |
steps   | accrot_qkv+fox+conv-4800 | 1 | --pos=accrot_qkv+fox+conv --max_steps=4800     |
steps   | accrot_qkv+fox+nope-4800 | 1 | --pos=accrot_qkv+fox+nope --max_steps=4800     |
steps   | accrot_qkv+fox+nope+conv-4800 | 1 | --pos=accrot_qkv+fox+nope+conv --max_steps=4800 | --logn
steps   | accrot_qkv+fox+nope+conv+floor-4800 | 3 | --pos=accrot_qkv+fox+nope+conv+floor --max_steps=4800 |
steps   | rope+fox+nope+conv+floor-4800 | 1 | --pos=rope+fox+nope+conv+floor --max_steps=4800 |
recall  | rope              | 1 | $RECALL --pos=rope                                    | --window=128
recall  | accrot_qkv        | 1 | $RECALL --pos=accrot_qkv                              | --logn
recall  | fox               | 1 | $RECALL --pos=fox                                     |
recall  | accrot_qkv+fox    | 1 | $RECALL --pos=accrot_qkv+fox                          |
recall  | accrot_qk         | 1 | $RECALL --pos=accrot_qk                               | --logn
recall  | accrot_qkv+fox+nope | 1 | $RECALL --pos=accrot_qkv+fox+nope                   | --logn
recall  | accrot_qkv+fox+nope-cross | 1 | $RECALL --pos=accrot_qkv+fox+nope --cross_batch=8 | --logn
recall  | accrot_qkv+fox+nope+conv | 1 | $RECALL --pos=accrot_qkv+fox+nope+conv         | --logn
recall  | accrot_qkv+fox+nope+conv-cross | 1 | $RECALL --pos=accrot_qkv+fox+nope+conv --cross_batch=8 | --logn
recall  | accrot_qkv+fox+nope+conv-deep | 1 | $RECALL --n_layer=4 --max_steps=2000 --pos=accrot_qkv+fox+nope+conv --cross_batch=8 | --logn
recall  | accrot_qkv+fox+nope+conv-alone-deep | 1 | $RECALL --n_layer=4 --max_steps=2000 --pos=accrot_qkv+fox+nope+conv | --logn
recall  | accrot_qkv+fox+nope+conv+floor | 1 | $RECALL --pos=accrot_qkv+fox+nope+conv+floor | --logn
recall  | accrot_qkv+fox+nope+conv+floor-deep | 1 | $RECALL --n_layer=4 --max_steps=2000 --pos=accrot_qkv+fox+nope+conv+floor | --logn
recall  | rope+fox+nope+conv-cross | 1 | $RECALL --pos=rope+fox+nope+conv --cross_batch=8 | --logn
recall  | rope+fox+nope     | 1 | $RECALL --pos=rope+fox+nope                           | --logn
recall  | rope+fox          | 1 | $RECALL --pos=rope+fox                                |
recall  | alibi             | 1 | $RECALL --pos=alibi                                   |
mixed   | accrot_qkv+fox    | 1 | $MIXED --pos=accrot_qkv+fox                           |
mixed   | accrot_qkv+fox+nope+conv+floor | 1 | $MIXED --pos=accrot_qkv+fox+nope+conv+floor |
mixed   | accrot_qkv+fox+nope+conv-cross | 1 | $MIXED --pos=accrot_qkv+fox+nope+conv --cross_batch=8 |
large   | rope              | 1 | $LARGE --pos=rope                                     | --window=512
large   | accrot_qkv        | 1 | $LARGE --pos=accrot_qkv                               | --logn
large   | alibi             | 1 | $LARGE --pos=alibi                                    |
large   | accrot_qkv+fox    | 1 | $LARGE --pos=accrot_qkv+fox                           |
large   | accrot_qkv+fox+nope+conv+floor | 1 | $LARGE --pos=accrot_qkv+fox+nope+conv+floor |
large   | accrot_qkv+fox+nope-cross | 1 | $LARGE --pos=accrot_qkv+fox+nope --cross_batch=6 |
large   | accrot_qkv+fox+nope+conv-cross | 1 | $LARGE --pos=accrot_qkv+fox+nope+conv --cross_batch=6 |
"
SEEDS=${SEEDS:-1 2 3} PARTS=${PARTS:-main context warm heads large steps recall mixed}

trained() {  # out steps flags...: train to the end, or go on to it; a run that a signal stopped has no validation there
    $RUN train.py "${@:3}" --out="$1"
    grep -q "\"step\": $2, \"val\"" "$1/log.jsonl" || { echo "study.sh: $1 is not finished; run it again" >&2; exit 1; }
}

flags_of() { awk -F' *[|] *' -v g="$1" -v n="$2" '$1 == g && $2 == n {print $4 "|" $5}' <<< "$ROWS"; }

row() {  # group name seed: train, evaluate, keep
    local group=$1 name=$2 seed=$3 flags tricks
    local kept=$KEEP/$group/$name-$seed out=out/study/$group-$name-$seed
    [ -f "$kept.json" ] && return
    IFS='|' read -r flags tricks < <(flags_of "$group" "$name")
    mkdir -p "$out" "$KEEP/$group" "$KEEP/long" "$KEEP/theory"
    local steps=1200
    [[ $flags =~ .*--max_steps=([0-9]+) ]] && steps=${BASH_REMATCH[1]}  # the last
    local common="--config=demo --data=data/stdlib --max_steps=1200 --dtype=$DTYPE --eval_interval=1200
                  --log_interval=50 --seed=$seed --resume $COMPILE"
    if [[ $flags =~ --init_from=([a-z_]+) ]]; then  # first the half of the steps that RoPE takes
        local before=${BASH_REMATCH[1]}
        trained "$out-before" $steps $common ${flags/--init_from=$before/} --pos=$before
        flags=${flags/--init_from=$before/--init_from=$out-before/ckpt.pt}
    fi
    trained "$out" $steps $common $flags
    rm -f "$out"/eval?.json "$out"/long*.json
    local length=256 tokens=65536 long=$KEEP/long/$name-$seed.json number=0 trick
    [[ $flags =~ --block_size=([0-9]+) ]] && length=${BASH_REMATCH[1]}
    local few="--lengths=$((16 * length)),$((128 * length)) --tokens=$tokens"
    local plain="--lengths=$length,$((2 * length)),$((4 * length)),$((16 * length)),$((64 * length)),$((128 * length)) --tokens=$tokens
                 --recall=16 --gaps=0,$((length / 2)),$((2 * length)),$((8 * length))"
    local letters="--data=data/letters --lengths=$length --tokens=$tokens --recall=64
                   --gaps=0,$((length / 2)),$length,$((2 * length)),$((4 * length)),$((8 * length)),$((32 * length))"
    [ "$group" = recall ] && plain=$letters few=$letters
    [ "$group" = mixed ] && plain+=" --data=data/stdlib" few+=" --data=data/stdlib" long=$KEEP/long/mixed-$name-$seed.json
    $RUN eval_length.py "$out/ckpt.pt" $plain --json="$out/eval0.json"
    for trick in $tricks; do
        number=$((number + 1))
        $RUN eval_length.py "$out/ckpt.pt" $few $trick --json="$out/eval$number.json"
    done
    if [[ $group =~ main|mixed || $name =~ 4800 ]]; then  # on long documents alone
        for trick in "" $tricks; do
            $RUN eval_length.py "$out/ckpt.pt" --data=data/stdlib-long --lengths=$((16 * length)) --tokens=$tokens $trick \
                --json="$out/long$trick.json"
        done
        $RUN eval_length.py "$out"/long*.json --json="$long"
    fi
    if [ "$group" = mixed ]; then
        mkdir -p "$KEEP/letters"
        $RUN eval_length.py "$out/ckpt.pt" $letters --json="$KEEP/letters/$name-$seed.json"
    fi
    if [[ $name =~ rot|orth|reflect ]]; then  # how far its routes reach, and what its steps are
        $RUN theory.py --ckpt="$out/ckpt.pt" --lengths=$length,$((16 * length)) --json="$KEEP/theory/$group-$name-$seed.json"
    fi
    cp "$out/log.jsonl" "$kept.log.jsonl"
    $RUN eval_length.py "$out"/eval?.json --json="$out/all.json" && mv "$out/all.json" "$kept.json"
}

prepare() {  # prepare_data.py knows what is finished, and refuses what was made otherwise
    mkdir -p data
    $RUN prepare_data.py --dataset=stdlib --tokenizer=bytes --out=data/stdlib
    $RUN prepare_data.py --dataset=stdlib --tokenizer=bytes --min_doc_tokens=4096 --out=data/stdlib-long
    # 26 random letters. To learn copying: a run three times and more, in every third document with up to 64 other letters before
    # each, else in succession. To ask in: letters alone.
    [ -f data/letters/meta.json ] || $RUN - <<'PYTHON'
import json, numpy
random, alphabet = numpy.random.default_rng(1), list("abcdefghijklmnopqrstuvwxyz")
def letters(low, high):
    return "".join(random.choice(alphabet, random.integers(low, high + 1)))
with open("data/copies.jsonl", "w") as copies, open("data/letters.jsonl", "w") as alone:
    for i in range(150_000):
        shortest, longest, most, apart = (8, 32, 8, 0) if i % 3 else (16, 40, 5, 64)
        run, times = letters(shortest, longest), random.integers(3, most + 1)
        copies.write(json.dumps({"text": "".join(letters(0, apart) + run for _ in range(times))}) + "\n")
    for _ in range(10):
        alone.write(json.dumps({"text": letters(100_000, 100_000)}) + "\n")
PYTHON
    $RUN prepare_data.py --dataset=data/copies.jsonl --val_fraction=0.02 --tokenizer=bytes --out=data/copies
    [ -f data/mixed/meta.json ] || $RUN - <<'PYTHON'
import json, prepare_data
with open("data/mixed.jsonl", "w") as mixed:  # the text, a third, then the copies
    for path, _ in prepare_data.local_files("stdlib"):
        mixed.write(json.dumps({"text": prepare_data.text_of(path, 1, open(path, "rb").read(), None)[0]}) + "\n")
    mixed.write(open("data/copies.jsonl").read())
PYTHON
    $RUN prepare_data.py --dataset=data/mixed.jsonl --tokenizer=bytes --out=data/mixed
    $RUN prepare_data.py --dataset=data/letters.jsonl --val_fraction=0.5 --tokenizer=bytes --out=data/letters
}

if [ $# = 3 ]; then
    [ -n "$(flags_of "$1" "$2")" ] || { echo "study.sh: no row '$1 $2'" >&2; exit 2; }
    prepare; row "$@"; exit
fi
[ $# = 0 ] || { echo "usage: ./study.sh [GROUP NAME SEED]" >&2; exit 2; }
prepare
todo=$(for seed in $SEEDS; do for group in $PARTS; do
    awk -F' *[|] *' -v g="$group" -v s="$seed" '$1 == g && s <= $3 {print g, $2, s}' <<< "$ROWS"
done; done | while read -r group name seed; do [ -f "$KEEP/$group/$name-$seed.json" ] || echo "$group $name $seed"; done)
export TOTAL=$(grep -c . <<< "$todo") BEGAN=$(date +%s) COUNT=$(mktemp)
one() {
    mkdir -p out/study
    ./study.sh "$@" > "out/study/$1-$2-$3.txt" 2>&1 && echo "$@" >> "$COUNT" && result=done || result="FAILED, see out/study/$1-$2-$3.txt"
    finished=$(grep -c . "$COUNT" || true)
    left=$((TOTAL - finished)) eta=$(( finished ? ($(date +%s) - BEGAN) * (TOTAL - finished) / finished : 0 ))
    echo "$(date +%H:%M) $* $result; $left of $TOTAL left, about $((eta / 3600)) h $((eta / 60 % 60)) min"
    [ "$result" = done ]
}
export -f one
echo "$TOTAL rows to do, $CORES at a time"
xargs -r -P "$CORES" -L 1 bash -c 'one "$@"' _ <<< "$todo"
