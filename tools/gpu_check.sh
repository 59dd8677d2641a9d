#!/usr/bin/env bash
# Everything that needs a GPU, in under 10 minutes: the tests of tests/gpu, then tools/bench_gpu.py.
# With --ranks, in as many minutes: several ranks over NCCL, on one GPU or on several
# (tools/nccl_check.py). Installs nothing. Failures are reported and the rest goes on; the exit code
# is 0 if all passed.
#
#   tools/gpu_check.sh [SITE_FOLDER]    packages to put before the machine's own
#   tools/gpu_check.sh [SITE_FOLDER] --ranks [2|4|8] [--parts NAME ...]
#   REHEARSE=1 tools/gpu_check.sh ...   all of it on a CPU, with a GPU that is pretended
#
#   PYTHON    the interpreter; unset: python3
#   OUT       where gpu_report and ranks_report (.json and .md) go; unset: runs/gpu_check
#   TRACES    folder of length traces (CSV); unset: ../shared/traces, generated lengths without it
#   REHEARSE  1: every process believes in a GPU (tests/rehearsal/gpu.py), Transformer Engine's Python
#             (tools/te_python.sh) runs on stand-ins, sizes are tiny and limits ten times as long. It
#             takes about 5 minutes on 2 cores. sample: only varlen attention and one model, a minute.
#             With --ranks, over gloo: 6 minutes with 4 ranks
set -uo pipefail

# Seconds; together with the benchmark's 40 s of grace they stay below 580. A rehearsal may run beside
# other work on a few cores.
patience=1
[[ -n ${REHEARSE:-} ]] && patience=10
readonly COMPILE_SECONDS=$((100 * patience)) TEST_SECONDS=$((270 * patience))
readonly BENCH_SECONDS=$((165 * patience))

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
out=$(realpath -m "${OUT:-$root/runs/gpu_check}")
traces=${TRACES:-$root/../shared/traces}
site=
ranks=()
if [[ -n ${1:-} && $1 != --ranks ]]; then
    site=$(realpath "$1") || exit 2
    shift
fi
if [[ ${1:-} == --ranks ]]; then
    shift
    # Without a number: as many as there are GPUs, or 4 on one.
    ranks=(--out "$out")
    if [[ ${1:-} =~ ^[0-9]+$ ]]; then
        ranks+=(--ranks "$1")
        shift
    fi
    ranks+=("$@")
elif (($#)); then
    printf 'tools/gpu_check.sh: %s is no option; see the head of the script\n' "$1" >&2
    exit 2
fi
rehearsal=
tests=()
bench=()
case ${REHEARSE:-} in
    '') ;;
    1 | sample)
        te=$root/.te/2.11.0
        if [[ ! -d $te ]]; then
            printf '%s\n' "REHEARSE needs Transformer Engine's Python: tools/te_python.sh" >&2
            exit 2
        fi
        export REHEARSE OMP_NUM_THREADS=1
        rehearsal=$root/tests/rehearsal/startup:$te
        bench=(--rehearse)
        if [[ $REHEARSE == sample ]]; then
            tests=(-k varlen)
            bench+=(--model Qwen3-1.7B)
        fi
        ;;
    *)
        printf 'REHEARSE=%s: it is 1 or sample\n' "$REHEARSE" >&2
        exit 2
        ;;
esac
export PYTHONPATH=$root${rehearsal:+:$rehearsal}${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out" || exit 2
cd "$root" || exit 2
status=0

fail() {
    printf 'tools/gpu_check.sh: %s\n' "$*" >&2
    status=1
}

# Only Transformer Engine can be missing: the rest still runs without it.
check_machine() {
    timeout "$COMPILE_SECONDS" "$python" - <<'PY'
import importlib
import sys

missing = []
for name in ("numpy", "numba", "yaml", "torch", "megatron.core", "transformer_engine.pytorch"):
    try:
        found = importlib.import_module(name)
    except Exception as error:
        missing.append(f"{name} does not import: {type(error).__name__}: {error}")
    else:
        package = sys.modules[name.partition(".")[0]]
        print(name, getattr(found, "__version__", getattr(package, "__version__", "")))
torch = sys.modules.get("torch")
if torch is not None and torch.cuda.is_available():
    print(torch.cuda.get_device_name(), "CUDA", torch.version.cuda)
else:
    missing.append("torch finds no CUDA device")
print(*missing, sep="\n", file=sys.stderr)
sys.exit(bool(missing))
PY
}

# A new machine compiles the planner for a minute. This runs beside the imports of
# check_machine, before any test's time begins.
compile_planner() {
    timeout "$COMPILE_SECONDS" "$python" -m tests.gpu.compile_planner
}

run_tests() {
    export MEGAPACK_GPU_RESULTS=$out/gpu_tests.json
    rm -f "$MEGAPACK_GPU_RESULTS"
    if "$python" -c 'import pytest' 2>/dev/null; then
        # Deprecation warnings of other packages must not fail these tests.
        timeout "$TEST_SECONDS" "$python" -m pytest -m gpu -W default -p no:cacheprovider \
            ${tests[@]+"${tests[@]}"} tests/gpu 2>&1 | tee "$out/gpu_tests.log"
    else
        fail 'pytest is not installed: figures are measured, but not checked against their limits'
        timeout "$TEST_SECONDS" "$python" -m tests.gpu.run "$MEGAPACK_GPU_RESULTS" cuda 2>&1 |
            tee "$out/gpu_tests.log"
    fi
}

run_bench() {
    local arguments=(--seconds "$BENCH_SECONDS" --out "$out" --tests "$out/gpu_tests.json")
    arguments+=(${bench[@]+"${bench[@]}"})
    local name
    for name in skythought_math500_g4 servegen_deepseek_r1_resampled; do
        if [[ -f $traces/$name.csv ]]; then
            arguments+=(--trace "$traces/$name.csv")
        fi
    done
    timeout "$((BENCH_SECONDS + 40))" "$python" tools/bench_gpu.py "${arguments[@]}"
}

if ((${#ranks[@]})); then
    check_machine || fail 'the machine lacks the packages or the device named above'
    TRACES=$traces "$python" tools/nccl_check.py "${ranks[@]}"
    code=$?
    # 2: the arguments are wrong, and there is no report.
    ((code != 2)) || exit 2
    ((code == 0)) || fail 'a part failed, see ranks_report.md'
    printf '%s\n' "$out/ranks_report.json" "$out/ranks_report.md"
    exit "$status"
fi
compile_planner &
compiling=$!
check_machine || fail 'the machine lacks the packages or the device named above'
wait "$compiling" || fail "the planner did not compile, or not in $COMPILE_SECONDS s"
run_tests || fail "a GPU test failed, or the tests took more than $TEST_SECONDS s"
run_bench || fail 'a part of the benchmark failed, see gpu_report.md'
printf '%s\n' "$out/gpu_report.json" "$out/gpu_report.md"
exit "$status"
