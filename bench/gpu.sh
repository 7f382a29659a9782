#!/usr/bin/env bash
# Everything that needs a GPU, in one script: tests, sanitizers, benchmarks.
#
#     bash bench/gpu.sh [part ...]              all parts, in the order of the table below, if none is named
#     bash bench/gpu.sh --together part ...     these at once, with twice the time: for parts that verify and do not measure
#
# Runs from the repository or from the bundle. `cargo xtask bundle` makes the binaries, so the machine with the GPU has
# no need of Rust. It needs a driver, libnvrtc, python3 with torch for `bench`, and the tools of the CUDA toolkit for
# `sanitize` and `ncu`. A part that fails or runs out of time does not stop the others. Everything said goes to gpu.log
# in the folder named by OUT (default ./out), beside h200.csv, h200-ncu.csv, h200-fusion.csv, h200-overhead.csv,
# h200-row-ladder.csv, h200-attention-ladder.csv, h200-launch-ladder.csv, h200-attention-peers.csv, h200-heads.csv, h200-matmul.csv, h200-matmul-choice.csv, h200-matmul-ladder.csv, h200-matmul-few-rows.csv, h200-ffn.csv, h200-experts.csv, h200-experts-int8.csv, h200-layers.csv,
# h200-launches-peers.csv, h200-launches-ncu.csv, h200-ncu-matmul.csv, h200-crossover.csv, h200-python-peers.csv, h200-conformance.csv, h200-clocks.csv, h200-train.csv, gpt2-cuda.csv, bench.json and machine.toml.
# Exit code 0 if every part passed. On an H200 all parts but `peers`, `attention` and `launches` took 13 minutes; `matrix` takes a
# minute more since, and `attention` 102 s.
set -u

# part       seconds  lines of its output that are shown
PARTS="
info         20       12
test         540      24
check        160      40
matrix       300      40
repeat       60       6
sanitize     240      12
calibrate    70       8
bench        150      90
ladders      240      90
peers        200      40
gpt2         200      30
train        90       6
attention    150      24
heads        120      30
matmul       260      70
choice       240      66
experts      300      24
layers       240      30
launches     280      60
ncu          110      60
limits       150      40
python       260      30
conformance  600      40
pypeers      150      40
"

here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
bundle=$root
[ -d "$root/bundle" ] && bundle=$root/bundle
[ -f "$bundle/deuteron.gz" ] && gunzip --force "$bundle/deuteron.gz"
deuteron=$bundle/deuteron
commit=$(cat "$bundle/commit" 2>/dev/null)
export OUT=${OUT:-out}
export PATH=$PATH:/usr/local/cuda/bin
# Where python3 keeps its packages, there are CUDA's libraries too.
export VIRTUAL_ENV=${VIRTUAL_ENV:-$(python3 -c 'import sys; print(sys.prefix)')}
export DEUTERON_NVRTC_ENV=${DEUTERON_NVRTC_ENV:-$VIRTUAL_ENV}
# Numbers found by `calibrate` serve the parts after it; they are kept apart from the user's own.
export XDG_CONFIG_HOME=${XDG_CONFIG_HOME:-${TMPDIR:-/tmp}/deuteron-config}

# Runs a command, says how it ended and how long it took, and remembers a failure.
failed=0
run() {
    echo "+ ${*##*/}" >&2
    local start=$SECONDS
    "$@"
    local code=$?
    echo "  exit code $code, $((SECONDS - start)) s" >&2
    [ $code -eq 0 ] || failed=1
    return $code
}

part_info() {
    run nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,temperature.gpu --format=csv
    run python3 -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
    python3 -c 'import liger_kernel; print("Liger is there")' 2>/dev/null || echo "Liger is not there"
    echo "commit ${commit:-unknown}, $(nproc) cores"
    run "$deuteron" doctor --device cuda
}

# A test that finds no GPU says that it is skipped, and here that is a failure. Tests that leave memory to others run side by side, each in a process of its
# own as the compiler takes one source at a time in each, as many as there are cores; then those that run out of it. Tests that only compile are CI's.
part_test() {
    local logs tests program
    logs=$(mktemp -d) tests=$(mktemp -d)
    trap 'report_tests; echo "out of time"; exit 124' TERM
    cp "$bundle"/tests/*.gz "$tests" && gunzip "$tests"/*.gz && chmod +x "$tests"/*
    export logs tests
    export -f test_program
    {
        apart deuteron-device-all attention:: nvrtc:: cache::
        apart deuteron-all cuda::products:: cuda::one_launch:: cuda::hopper:: cuda::bytes:: cuda::experts::
        apart deuteron-device-lib ""
        apart deuteron-train-all engines::
        apart deuteron-gpt2-all engines::
    } | xargs -P "$(nproc)" -n 2 bash -c 'test_program "$1-${2//::/-}" "$tests/$1" --exact "$2"' apart &
    wait  # a command in the foreground would keep the trap waiting
    for program in deuteron-device-all deuteron-all; do
        test_program "$program-cuda" "$tests/$program" --test-threads 8 cuda:: --skip cuda::products:: --skip cuda::one_launch:: \
            --skip cuda::hopper:: --skip cuda::bytes:: --skip cuda::experts:: &
        wait
    done
    report_tests
}

# Lists the tests of some modules of a program: the program and a name, a line each.
apart() {
    local program=$1 names
    shift
    names=$("$tests/$program" --list --format terse "$@" | sed -n 's/: test$//p' | grep -v '::cpu::\|^cpu::\|compiles_without_spills\|::a_cpu_')
    [ -n "$names" ] || echo "result: no tests" >"$logs/$program-${1//::/}"
    sed "s/^/$program /" <<<"$names"
}

# Runs a test program, and says at the end how it went and how long it took. A choice of no tests is a failure.
test_program() {
    local log=$logs/$1 words start=$SECONDS outcome=failed
    shift
    echo "result: not ended" >"$log"
    words=$("$@" --show-output 2>&1) && ! grep -qi '\bskipped\b\|^running 0 tests' <<<"$words" && outcome=passed
    printf '%s\nresult: %s after %s s\n' "$words" "$outcome" $((SECONDS - start)) >"$log"
}

# What did not pass, whole, then the slowest and the counts.
report_tests() {
    local name
    tar -czf "$OUT/tests-log.tgz" -C "$logs" .
    for name in "$logs"/*; do
        grep -q '^result: passed' "$name" || { echo "== ${name##*/}"; tail -n 60 "$name"; failed=1; }
    done
    [ -n "$(ls "$logs")" ] || { echo "no test programs in $bundle/tests"; failed=1; }
    grep -H '^result: ' "$logs"/* | sed 's|.*/||; s/:result: / /' | sort -k 4 -n -r | head -n 8
    echo "processes: $(grep -l '^result: passed' "$logs"/* | wc -l) passed, $(grep -L '^result: passed' "$logs"/* | wc -l) not; tests passed:" \
        "$(grep -h '^test result' "$logs"/* | awk '{ sum += $4 } END { print sum + 0 }')"
    rm -r "$logs" "$tests"
}

# Several processes, as the compiler takes one source at a time in each: random graphs, and the op matrix.
part_check() { spread 16 random_graphs; }
part_matrix() { spread 16 op_matrix; }
random_graphs() { "$deuteron" check --device cuda --cases $((2000 / $2)) --seed $((1000 * $1)) --red-zones; }
op_matrix() { "$deuteron" check --device cuda --catalog --part "$1/$2" --red-zones; }

# Runs `WHAT i COUNT` for i from 1 to COUNT at once. Of those that pass, the line with the outcome is shown.
spread() {
    local count=$1 what=$2 logs number processes=()
    echo "+ $what in $count processes" >&2
    logs=$(mktemp -d)
    for number in $(seq "$count"); do
        "$what" "$number" "$count" >"$logs/$number" 2>&1 &
        processes[number]=$!
    done
    for number in "${!processes[@]}"; do
        if wait "${processes[number]}"; then
            grep -hE '^[0-9]+ (failures|cases|OpInfos)' "$logs/$number"
        else
            tail -n 40 "$logs/$number"
            failed=1
        fi
    done
    rm -r "$logs"
}

# Every op again and again beside a stream that keeps the GPU busy: the same bits each time.
part_repeat() {
    run "$deuteron" check --device cuda --catalog --small --repeat 1000
}

# Kernels come from the cache on disk: a run without a sanitizer fills it first. The four tools then run side by side.
part_sanitize() {
    local logs tool
    local checks=("$deuteron" check --device cuda --catalog --small)
    # Sequences of an odd length, two of them, and rows that fill no tile.
    local ladder=("$deuteron" bench attention attention_add_norm attention_block --ladder --once --rows 258 --seq 129 --cols 128
        --device cuda)
    # Every rung of row work, of rows that fill no block.
    local rows=("$deuteron" bench add_act norm_act softmax --ladder --once --rows 259 --cols 136 --dtype bf16 --device cuda)
    # Every cut of a matmul, of sizes that fill no tile.
    local matmul=("$deuteron" bench matmul --once --rows 300 --weights 264x200 --epilogue residual --device cuda)
    # Every rung of its ladder, of rows that start at multiples of 16 bytes and of odd ones.
    local rungs=("$deuteron" bench matmul --ladder --once --rows 300 --weights 264x200,133x131 --device cuda)
    logs=$(mktemp -d)
    run "${checks[@]}"
    run "${matmul[@]}"
    run "${rungs[@]}"
    run "${rows[@]}"
    run "${ladder[@]}" >"$logs/rungs"
    cat "$logs/rungs"
    local op
    for op in attention_add_norm attention_block; do
        grep -q "^$op one launch" "$logs/rungs" || echo "NOT CHECKED: $op has no one launch at this size"
    done
    rm "$logs/rungs"
    trap 'tail -n 40 "$logs"/*; exit 124' TERM  # out of time: say how far each got
    declare -A process
    # One core each: the race checker loses track of launches that come from several threads at once.
    local core=0
    for tool in memcheck racecheck initcheck synccheck; do
        local sanitizer=(taskset -c $core compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 20)
        { "${sanitizer[@]}" "${checks[@]}" && "${sanitizer[@]}" "${ladder[@]}" && "${sanitizer[@]}" "${matmul[@]}" && "${sanitizer[@]}" "${rungs[@]}" && "${sanitizer[@]}" "${rows[@]}"; } >"$logs/$tool" 2>&1 &
        process[$tool]=$!
        core=$((core + 1))
    done
    for tool in memcheck racecheck initcheck synccheck; do
        wait "${process[$tool]}"
        echo "$tool: exit code $?" >>"$logs/result"
        grep -q "^$tool: exit code 0" "$logs/result" || failed=1
        sed "s/^/$tool: /" "$logs/$tool" | tail -n 400
    done
    grep -h 'SUMMARY' "$logs"/*check | sort | uniq -c
    cat "$logs/result"
    rm -r "$logs"
}

part_calibrate() {
    run "$deuteron" doctor --device cuda --calibrate
    # The newest file is the one that was written just now, whatever the machine is called.
    local file
    file=$(ls -t "$XDG_CONFIG_HOME"/deuteron/machines/*.toml 2>/dev/null | head -n 1)
    if [ -n "$file" ]; then cp "$file" "$OUT/machine.toml"; else echo "no machine file was left"; failed=1; fi
    run "$deuteron" doctor --device cuda --validate
}

part_bench() {
    local rows
    rows=$(mktemp -d)
    run "$deuteron" bench --rows 65536 --cols 768 --dtype bf16 --device cuda --json >"$rows/1"
    run "$deuteron" bench --rows 16384 --cols 4096 --dtype bf16 --device cuda --json >"$rows/2"
    run "$deuteron" bench --rows 65536 --cols 768 --dtype bf16 --backward --device cuda --json >"$rows/3"
    run "$deuteron" bench add_act act_dropout_add --elements 100000000 --device cuda --json >"$rows/4"
    run fusion_table "$rows"/[1-4]
    rm -r "$rows"
    run overhead_row
}

# Every ladder from naive to shipped.
part_ladders() {
    run row_ladder_rows
    run attention_ladder_rows
    run launch_ladder_rows
    run matmul_ladder_rows
}

row_ladder_rows() {
    "$deuteron" bench add_act norm_act softmax --ladder --rows 1024,65536 --cols 768 --dtype bf16 --device cuda --json |
        csv_rows h200-row-ladder op rows rung us speedup fraction_of_copy registers worst_ratio
}

attention_ladder_rows() {
    "$deuteron" bench attention --ladder --device cuda --json |
        csv_rows h200-attention-ladder op rows cols rung us speedup tflops worst_ratio
}

# Attention and what follows it, from naive and many launches to one.
launch_ladder_rows() {
    "$deuteron" bench attention_add_norm attention_block --ladder --device cuda --json |
        csv_rows h200-launch-ladder op rows cols rung kernels launches us speedup worst_ratio
}

# Where one launch of attention and what follows it wins, measured beside predicted.
crossover_rows() {
    "$deuteron" bench --crossover --device cuda --json |
        csv_rows h200-crossover op batch sequence hidden apart_launches apart_us one_launches one_us one_predicted_us takes_one over_best
}

# Writes rows of JSON into OUT/$1.csv, with commit and date, and shows the columns that are named.
csv_rows() {
    python3 -c '
import csv, datetime, json, sys
folder, commit, name, *shown = sys.argv[1:]
text = sys.stdin.read()
rows = json.loads(text) if text.strip() else []
rows = [{key: value for key, value in row.items() if not isinstance(value, list)} for row in rows]
if not rows:
    sys.exit(f"no rows for {name}.csv")
last = {"commit": commit, "date": datetime.date.today()}
with open(f"{folder}/{name}.csv", "w") as file:
    table = csv.DictWriter(file, [*rows[0], *last], lineterminator="\n")
    table.writeheader()
    for row in rows:
        table.writerow({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()} | last)
cells = [shown] + [[f"{row[key]:.2f}" if isinstance(row[key], float) else str(row[key]) for key in shown] for row in rows]
widths = [max(map(len, column)) for column in zip(*cells)]
for line in cells:
    print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
sys.exit(any(row.get("verified") is False for row in rows))' "$OUT" "${commit:-unknown}" "$@"
}

part_peers() {
    run python3 "$here/peers_gpu.py" --binary "$deuteron" --commit "$commit" --seconds $((190 - SECONDS))
}

# GPT-2's matmuls beside cuBLASLt and torch.
part_matmul() {
    run few_rows
    run ffn_rows
    run python3 "$here/peers_matmul_gpu.py" --binary "$deuteron" --commit "$commit"
}

# Matmuls of random sizes: what plans take beside the fastest variant.
part_choice() {
    run python3 "$here/matmul_choice.py" --binary "$deuteron" --commit "$commit" --seed "$(date +%j)" --cases 25
}

# Every variant of matmuls of few rows, and the feed-forward op from one row on: where kernels and the library change places.
few_rows() {
    "$deuteron" bench matmul --rows 2,4,8,16,64,128,256 --weights 3072x768,768x2304 --dtype bf16 --device cuda --json |
        csv_rows h200-matmul-few-rows rows inner columns variant chosen us worst_ratio
}
ffn_rows() {
    "$deuteron" bench ffn --rows 1,2,4,5,8,16,17,64,128,200,256,1024,8192 --dtype bf16 --device cuda --json |
        csv_rows h200-ffn op rows kernels_fused fused_graph_us unfused_graph_us predicted_us
}

matmul_ladder_rows() {
    "$deuteron" bench matmul --ladder --device cuda --json |
        csv_rows h200-matmul-ladder rows inner columns rung us tflops speedup over_library registers worst_ratio
}

# Rows routed to experts, in bf16 and in int8, beside torch and a grouped matmul in Triton.
part_experts() {
    unpack_python
    run python3 "$here/peers_experts.py" --binary "$deuteron" --commit "$commit"
}

# Layers around matmuls from Python, beside torch.
part_layers() {
    unpack_python
    run python3 "$here/peers_layers.py" --binary "$deuteron" --commit "$commit"
}

# Attention and its gradient beside torch's flash and cuDNN.
part_attention() {
    run python3 "$here/peers_attention.py" --binary "$deuteron" --commit "$commit"
}

# Attention of heads that share keys and of other widths, from Python.
part_heads() {
    unpack_python
    run python3 "$here/peers_heads.py" --binary "$deuteron" --commit "$commit"
}

# Attention and what follows it in many launches and in one, beside torch, with the bytes that are moved; then where one launch wins.
part_launches() {
    run python3 "$here/peers_launches.py" --binary "$deuteron" --commit "$commit"
    run crossover_rows
}

# GPT-2 in bf16 beside torch, eager and compiled, and with int8 weights, all as CUDA graphs; first ours alone, with the clocks that the GPU has meanwhile.
part_gpt2() {
    watch_clocks gpt2 "$deuteron" bench gpt2 --device cuda --dtype bf16
    watch_clocks gpt2-8x1000 "$deuteron" bench gpt2 --device cuda --dtype bf16 --batch 8 --context 1000
    run python3 "$here/peers_gpt2.py" --binary "$deuteron" --commit "$commit" --device cuda --dtypes bf16 int8 --batches 1 8 \
        --contexts 128 --rounds 2
}

# Steps of GPT-2 124M in bf16 on random tokens: the median of tokens per second after the first steps, and the clocks meanwhile.
part_train() {
    local folder
    folder=$(mktemp -d)
    python3 -c '
import array, random, sys
random.seed(1)
array.array("H", [random.randrange(50257) for _ in range(1 << 20)]).tofile(open(sys.argv[1], "wb"))' "$folder/tokens.bin"
    local words=(--size gpt2 --tokenizer gpt2 --context 1024 --batch 32 --steps 60 --precision bf16 --evaluate-every 0 --save-every 0)
    watch_clocks train "$deuteron" train "$folder/tokens.bin" "${words[@]}" --device cuda --json --out "$folder/run" >"$folder/said"
    python3 - "$folder" "$OUT/h200-train.csv" "${commit:-unknown}" "deuteron train TOKENS ${words[*]}" <<'PYTHON' || failed=1
import csv, datetime, json, statistics, sys

folder, table, commit, command = sys.argv[1:]
said = open(f"{folder}/said").read()
ended = json.loads(said[said.index("{"):said.rindex("}") + 1])
steps = list(csv.DictReader(open(f"{folder}/run/log.csv")))[20:]
row = {"command": command, "parameters": ended["parameters"], "steps": len(steps),
       "tokens_per_second": round(statistics.median(float(step["tokens_per_second"]) for step in steps)),
       "memory_gib": round(ended["memory_bytes"] / 2**30, 2), "device": ended["device"].split(": ")[-1].split(",")[0],
       "commit": commit, "date": datetime.date.today()}
print(", ".join(f"{key} {value}" for key, value in row.items()))
with open(table, "w") as file:
    writer = csv.DictWriter(file, list(row), lineterminator="\n")
    writer.writeheader()
    writer.writerow(row)
PYTHON
    rm -r "$folder"
}

# Runs a command, and samples clocks and power twenty times a second: over the samples where the GPU is busy, lowest, median and highest clock, highest
# power, and how often the power cap held the clock down. The row goes to OUT/h200-clocks.csv.
watch_clocks() {
    local name=$1 samples sampler
    shift
    samples=$(mktemp)
    nvidia-smi --query-gpu=clocks.sm,power.draw,clocks_event_reasons.sw_power_cap,utilization.gpu --format=csv,noheader,nounits -lms 50 >"$samples" &
    sampler=$!
    run "$@"
    kill $sampler
    python3 - "$samples" "$OUT/h200-clocks.csv" "$name" "${commit:-unknown}" <<'PYTHON'
import csv, datetime, pathlib, statistics, sys

samples, table, name, commit = sys.argv[1:]
rows = [line.split(", ") for line in open(samples).read().splitlines() if line.count(", ") == 3]
busy = [(int(clock), float(power), cap.strip() == "Active") for clock, power, cap, used in rows if int(used) > 50]
if busy:
    clocks = [clock for clock, _, _ in busy]
    row = {"run": name, "samples": len(busy), "clock_least_mhz": min(clocks), "clock_median_mhz": statistics.median(clocks),
           "clock_most_mhz": max(clocks), "power_most_w": max(power for _, power, _ in busy),
           "capped_share": round(sum(cap for _, _, cap in busy) / len(busy), 3), "commit": commit, "date": datetime.date.today()}
    print(", ".join(f"{key} {value}" for key, value in row.items()))
    new = not pathlib.Path(table).exists()
    with open(table, "a") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
PYTHON
    rm "$samples"
}

# What a call costs beside its kernel, as the row of h200-overhead.csv.
overhead_row() {
    "$deuteron" bench --overhead --device cuda --json | python3 -c '
import csv, datetime, json, sys
rows = json.load(sys.stdin)
last = {"commit": sys.argv[2], "date": datetime.date.today()}
table = csv.DictWriter(open(f"{sys.argv[1]}/h200-overhead.csv", "w"), [*rows[0], *last], lineterminator="\n")
table.writeheader()
for row in rows:
    table.writerow({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()} | last)
over, cold, disk = (rows[0][key] for key in ("launch_us", "first_cold_ms", "first_disk_ms"))
over -= rows[0]["bare_launch_us"]
print(f"launch {over:.2f} us over the bare call (bar 1), first call {cold:.0f} ms cold (bar 500), {disk:.1f} ms from disk (bar 5)")
sys.exit(over > 1 or cold > 500 or disk > 5)' "$OUT" "${commit:-unknown}"
}

# Gathers rows of `deuteron bench` in bench.json and h200-fusion.csv, and shows what fusion won beside what the saved bytes allow.
fusion_table() {
    python3 - "$OUT" "${commit:-unknown}" "$@" <<'PYTHON'
import csv
import datetime
import json
import sys

folder, commit, *names = sys.argv[1:]
rows = [row for name in names for text in [open(name).read()] if text.strip() for row in json.loads(text)]
with open(f"{folder}/bench.json", "w") as file:
    json.dump(rows, file, indent=1)
columns = "op direction rows cols dtype fused_graph_us unfused_graph_us speedup bytes_ratio gbps copy_gbps fraction_of_copy predicted_us device commit date"
with open(f"{folder}/h200-fusion.csv", "w") as file:
    table = csv.DictWriter(file, columns.split(), extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    for row in rows:
        numbers = {key: round(value, 3) for key, value in row.items() if isinstance(value, float)}
        ratio = round(row["bytes_unfused"] / row["bytes_fused"], 3)
        device = row["device"].split(": ")[-1].split(",")[0]
        table.writerow(row | numbers | {"bytes_ratio": ratio, "device": device, "commit": commit, "date": datetime.date.today()})
print(f"{'microseconds, in graphs':<40}{'fused':>9}{'unfused':>9}{'speed-up':>9}{'of bytes':>9}{'of copy':>9}"
      f"{'predicted':>10}  slowest unfused kernel")
missed = []
for row in rows:
    name = f"{row['op']} {row['rows']}x{row['cols']} {row['dtype']} {row['direction']}"
    fused, unfused = row["fused_graph_us"], row["unfused_graph_us"]
    of_bytes = unfused / fused / (row["bytes_unfused"] / row["bytes_fused"])
    slowest = min(row["unfused_kernels"], key=lambda kernel: kernel["fraction_of_copy"], default=None)
    words = f"{slowest['name']} {slowest['fraction_of_copy']:.0%}" if slowest else ""
    print(f"{name:<40}{fused:9.1f}{unfused:9.1f}{unfused / fused:8.2f}x{of_bytes:9.0%}{row['fraction_of_copy']:9.0%}"
          f"{row['predicted_us']:10.1f}  {words}")
    if row["op"].startswith("attention") or row["op"] in ("linear_act", "norm_linear", "qkv", "ffn", "linear_cross_entropy", "moe", "moe_int8"):
        continue  # a matrix product is not held to the speed of a copy
    least = 0.8 if row["direction"] == "backward" else 0.9
    bars = {"of bytes": (of_bytes, 0.85), "of copy": (row["fraction_of_copy"], least),
            "slowest unfused kernel": (slowest["fraction_of_copy"] if slowest else 1, 0.8)}
    missed += [f"{name}: {what} {value:.0%}, bar {bar:.0%}" for what, (value, bar) in bars.items() if value < bar]
print("\n".join(["bars missed:", *missed] if missed else ["no bar missed"]))
sys.exit(bool(missed) or not rows)
PYTHON
}

# The Python package from its wheel, beside torch: tests that need a GPU.
part_python() {
    unpack_python
    run python3 -m pytest -p no:cacheprovider -c "$bundle/python/pyproject.toml" --rootdir "$bundle/python/tests" -m gpu \
        "$bundle/python/tests"
}

# Torch's own samples of every function through `fuse` and the catalogue, the first three of each dtype.
part_conformance() {
    unpack_python
    rows=$(mktemp -d)
    spread 16 conformance
    # The head of one file, the rows of all.
    cat "$rows"/*.csv 2>/dev/null | awk 'NR == 1 || !/^op,/' >"$OUT/h200-conformance.csv"
    [ "$(wc -l <"$OUT/h200-conformance.csv")" -gt 1 ] || failed=1
    rm -r "$rows"
}
conformance() {
    OMP_NUM_THREADS=1 python3 "$bundle/python/tests/conformance.py" --device cuda --most 3 --part "$1/$2" --commit "$commit" \
        --out "$rows/$1.csv"
}

# The same timed beside torch: calls of ops, GPT-2 of Hugging Face, generation, training.
part_pypeers() {
    unpack_python
    HF_HUB_OFFLINE=1 run python3 "$here/peers_python.py" --commit "$commit" --out "$OUT/h200-python-peers.csv"
    # What a call costs is told over a bare launch of the same machine.
    run overhead_row
}

# A wheel is a zip file: unpacked beside pytest, it is installed.
unpack_python() {
    local folder=${TMPDIR:-/tmp}/deuteron-python
    mkdir -p "$folder"
    python3 -m zipfile -e "$bundle"/python/*.whl "$folder"
    tar -xzf "$bundle/python/site.tar.gz" -C "$folder"
    export PYTHONPATH=$folder:$folder/site
}

part_ncu() {
    run python3 "$here/ncu_table.py" --binary "$deuteron" --commit "$commit"
}

# What limits the matmul kernels whose bars are missed.
part_limits() {
    run python3 "$here/ncu_matmul.py" --binary "$deuteron" --commit "$commit"
}

if [ "${1:-}" = --part ]; then
    "part_$2"
    exit $failed
fi

together=0
[ "${1:-}" = --together ] && { together=1; shift; }
names=$(awk 'NF { print $1 }' <<<"$PARTS")
[ $together = 1 ] && [ $# -eq 0 ] && { echo "--together wants the parts' names; there are:" $names >&2; exit 2; }
# It starts a process for each of its longest tests: beside those of other parts there are more contexts than the GPU has memory for.
[ $together = 1 ] && [[ " $* " == *" test "* ]] && { echo "--together expected parts that share the GPU, got \`test\`, which needs it alone: run it in a call of its own" >&2; exit 2; }
for part in "$@"; do
    grep -qx -- "$part" <<<"$names" || { echo "no part '$part'; there are:" $names >&2; exit 2; }
done
[ -x "$deuteron" ] || { echo "no $deuteron; run \`cargo xtask bundle\` first" >&2; exit 2; }
mkdir -p "$OUT"
log=$OUT/gpu.log
: >"$log"
table=$(printf '%-12s %-8s %s' part outcome seconds)
worst=0

# Runs a part within so many times its limit. What it says goes to a file, behind it the exit code and the seconds.
run_part() {
    local part=$1 times=$2 said=$3 limit start=$SECONDS
    read -r _ limit _ < <(grep "^$part " <<<"$PARTS")
    PYTHONUNBUFFERED=1 timeout --kill-after=5 $((times * limit)) bash "$0" --part "$part" >"$said" 2>&1 </dev/null
    echo "$? $((SECONDS - start))" >>"$said"
}

# Shows what a part said, and remembers how it ended.
show_part() {
    local part=$1 said=$2 shown code seconds outcome
    read -r _ _ shown < <(grep "^$part " <<<"$PARTS")
    read -r code seconds < <(tail -n 1 "$said")
    case $code in
        0) outcome=passed ;;
        124 | 137) outcome="too long" worst=1 ;;
        *) outcome=failed worst=1 ;;
    esac
    echo "== $part" | tee -a "$log"
    head -n -1 "$said" | tee -a "$log" | tail -n "$shown"
    table+=$'\n'$(printf '%-12s %-8s %s' "$part" "$outcome" "$seconds")
}

said=$OUT/said
mkdir -p "$said"
for part in ${@:-$names}; do
    if [ $together = 1 ]; then
        run_part "$part" 2 "$said/$part" &
    else
        run_part "$part" 1 "$said/$part"
        show_part "$part" "$said/$part"
    fi
done
if [ $together = 1 ]; then
    wait
    for part in "$@"; do show_part "$part" "$said/$part"; done
fi
rm -r "$said"
echo "$table" | tee -a "$log"
exit $worst
