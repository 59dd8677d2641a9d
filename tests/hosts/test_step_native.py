"""Settings in the hosts' own configs, through their parsers; see `tests.hosts.steps.native`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tools.hosting.sources import NoSource, source

pytestmark = [pytest.mark.hosts, pytest.mark.host_steps]

LAYOUT = "{dp: 2, pp: 2}"
# Host -> settings on its command line, and what becomes of them; then a wrong name, and its error.
CASES = {
    "verl": (
        [
            "+actor_rollout_ref.megapack.light_rank=pad",
            "+actor_rollout_ref.megapack.share_prefixes=false",
            f"+actor_rollout_ref.megapack.layout={LAYOUT}",
        ],
        {"light_rank": "pad", "share_prefixes": False},
        "+actor_rollout_ref.megapack.light_rnk=pad",
        "actor_rollout_ref.megapack: unknown key light_rnk; did you mean light_rank?",
    ),
    "nemo_rl": (
        [
            "++policy.megapack.non_finite=error",
            "++policy.megapack.share_prefixes=false",
            f"++policy.megapack.layout={LAYOUT}",
        ],
        {"non_finite": "error", "share_prefixes": False},
        "++policy.megapack.non_finit=error",
        "policy.megapack: unknown key non_finit; did you mean non_finite?",
    ),
    **{
        host: (
            ["--megapack-count-rule", "legal", "--megapack-share-prefixes=false"],
            {"count_rule": "legal", "share_prefixes": False},
            "--megapack-count-rul=legal",
            "unknown argument --megapack-count-rul; did you mean --megapack-count-rule?",
        )
        for host in ("slime", "miles")
    },
}


def run(host: str, *given: str) -> subprocess.CompletedProcess[str]:
    try:
        source(host)
    except NoSource as error:
        pytest.skip(str(error))
    # The config says otherwise, and wins.
    environment = {**os.environ, "MEGAPACK_SHARE_PREFIXES": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.hosts.steps.native", host, *given]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )


@pytest.mark.parametrize("host", CASES)
def test_a_host_reads_settings_of_its_own_config(host: str) -> None:
    given, expected, _, _ = CASES[host]
    done = run(host, *given)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")]
    # NeMo-RL's driver and its worker each read them.
    assert len(lines) == (2 if host == "nemo_rl" else 1)
    for options in lines:
        for name, value in expected.items():
            assert {value} == {each[name] for each in options if name in each}
        if host in ("verl", "nemo_rl"):
            assert (options[0]["layout"]["dp"], options[0]["layout"]["pp"]) == (2, 2)


@pytest.mark.parametrize("host", CASES)
def test_an_unknown_name_is_refused_with_the_nearest(host: str) -> None:
    *_, wrong, says = CASES[host]
    done = run(host, wrong)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(says)
    assert "[{" not in done.stdout
