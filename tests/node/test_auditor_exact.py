"""An auditor of a run that is exactly on-policy rolls out again, and no bit may differ."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from audited import Setting, edited, honest, make_setting, opened

from flowtrain.dataflow.contract import LeaseRequest
from flowtrain.node.auditor import Auditor, Lie
from flowtrain.types import Call


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    with make_setting(tmp_path_factory.mktemp("exact"), "sample") as made:
        yield made


def test_rolling_out_again_finds_lies_that_no_score_tells(exact: Setting, tmp_path: Path) -> None:
    """Rollouts of other seeds are the model's own: who may choose them chooses their rewards."""
    config, sampler, _ = exact
    ledger = opened(exact, tmp_path)
    leases = ledger.lease(LeaseRequest("honest", "life", 2)).leases
    auditor = Auditor(ledger, "auditor", config, sampler)

    def tiny(call: Call) -> Call:
        return replace(call, logprobs=(math.nextafter(call.logprobs[0], -9.0), *call.logprobs[1:]))

    async def main() -> None:
        for lease, version in zip(leases, (1, 0), strict=True):
            await auditor.check(await honest(sampler, lease, version), lease)
            chosen = await honest(sampler, lease, version, first=1)
            with pytest.raises(Lie, match="samples other tokens than it says"):
                await auditor.check(chosen, lease)
            with pytest.raises(Lie, match="its log-prob is"):
                await auditor.check(edited(await honest(sampler, lease, version), tiny), lease)
        assert auditor.tally.largest_mean == 0.0

    asyncio.run(main())
    ledger.close()
