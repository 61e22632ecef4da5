"""Readings of `bench.roofline` from machine code, on loops whose waits can be counted by hand."""

from __future__ import annotations

import pytest

from bench import roofline, sass
from bench.roofline import DEVICES, Goal, Loop, Resources, SmallGoal

_HEAD = ".L_x_1:\n"
_TAIL = "        /*0900*/                   @P0 BRA `(.L_x_1) ;\n"
SUNK = """
        /*0100*/  LDG.E.EL.128 R4, desc[UR4][R2.64] ;
        /*0110*/  FADD R20, R4, R5 ;
        /*0120*/  LDG.E.EL.128 R4, desc[UR4][R2.64+0x1000] ;
        /*0130*/  FADD R20, R20, R4 ;
"""
TOGETHER = """
        /*0100*/  LDG.E.EL.128 R4, desc[UR4][R2.64] ;
        /*0110*/  LDG.E.EL.128 R8, desc[UR4][R2.64+0x1000] ;
        /*0120*/  FADD R20, R4, R5 ;
        /*0130*/  MUFU.EX2 R21, R8 ;
"""
PIPELINED = """
        /*0100*/  FADD R20, R4, R20 ;
        /*0110*/  FADD R20, R11, R20 ;
        /*0120*/  LDG.E.EL.128 R4, desc[UR4][R2.64] ;
        /*0130*/  LDG.E.EL.128 R8, desc[UR4][R2.64+0x1000] ;
"""
OVERWRITTEN = """
        /*0100*/  LDG.E.EL.128 R4, desc[UR4][R2.64] ;
        /*0110*/  MOV R7, RZ ;
        /*0120*/  LDG.E.EL.128 R8, desc[UR4][R2.64+0x1000] ;
        /*0130*/  FADD R20, R8, R5 ;
"""
STORED = """
        /*0100*/  LDG.E.EL.128 R4, desc[UR4][R2.64] ;
        /*0110*/  LDG.E.EL.128 R8, desc[UR4][R2.64+0x1000] ;
        /*0120*/  STG.E.EL.128 desc[UR4][R2.64], R4 ;
        /*0130*/  STG.E.EL.128 desc[UR4][R2.64+0x1000], R8 ;
"""


def loop_of(body: str) -> Loop:
    (loop,) = roofline.hot_loops(sass.parse(_HEAD + body + _TAIL))
    return loop


@pytest.mark.parametrize(
    ("body", "waits", "in_flight"),
    [
        (SUNK, 2, 1),
        (TOGETHER, 1, 2),
        (PIPELINED, 1, 2),
        (OVERWRITTEN, 2, 1),
        (STORED, 1, 2),
    ],
)
def test_waits_of_a_warp_are_counted(body: str, waits: float, in_flight: float) -> None:
    loop = loop_of(body)
    assert (loop.waits, loop.loads_in_flight) == (waits, in_flight)
    assert loop.bytes_loaded == 32 and loop.num_elements(2) == 16
    assert loop.count() == 5 and loop.count("LDG") == 2


def test_only_innermost_loops_that_touch_memory_are_hot() -> None:
    text = f"""
.L_x_0:
        /*0010*/  IADD3 R1, R1, 0x1, RZ ;
.L_x_2:
        /*0020*/  FADD R9, R9, R9 ;
        /*0030*/  @P1 BRA `(.L_x_2) ;
{_HEAD}{SUNK}{_TAIL}
        /*0a00*/  @P2 BRA `(.L_x_0) ;
        /*0a10*/  EXIT ;
"""
    (loop,) = roofline.hot_loops(sass.parse(text))
    assert loop.counts["LDG"] == 2 and loop.instructions[0].address == 0x100


def test_threads_at_work_are_limited_by_registers_and_shared_memory() -> None:
    device = DEVICES["sm_90"]
    assert Resources(80, 0, 8).threads_per_sm(device) == 768
    assert Resources(81, 0, 8).threads_per_sm(device) == 512
    assert Resources(16, 0, 8).threads_per_sm(device) == 2048
    assert Resources(16, 100 * 1024, 8).threads_per_sm(device) == 512
    assert Resources(128, 0, 16).threads_per_sm(device) == 512


def test_bounds_follow_from_counts_and_latency() -> None:
    """32 warps, two loads of 16 bytes per 700 ns; five instructions for 16 elements."""
    program = sass.parse(_HEAD + TOGETHER + _TAIL)
    device, resources = DEVICES["sm_90"], Resources(64, 0, 32)
    row = roofline.row(program, device, resources, goal=Goal(0.5, 1), element_size=2)
    assert row["latency_tb_s"] == pytest.approx(132 * 1024 * 32 / 700e-9 / 1e12)
    assert row["issue_tb_s"] == pytest.approx(132 * 1.755e9 * 128 * 32 / 5 / 1e12)
    assert row["special_tb_s"] == pytest.approx(132 * 1.755e9 * 16 * 32 / 1e12)
    assert row["goal_tb_s"] == pytest.approx(2.15)
    assert row["fault"] == "2.0 loads in flight"


def test_faults_name_what_keeps_a_kernel_from_its_goal() -> None:
    narrow = SUNK.replace(".128", ".U16") + "        /*0140*/  SHFL.BFLY PT, R4, R5, 0x10, 0x1f ;\n"
    program = sass.parse(_HEAD + narrow + _TAIL)
    row = roofline.row(
        program,
        DEVICES["sm_90"],
        Resources(80, 0, 8),
        goal=Goal(0.88, 1),
        element_size=2,
    )
    for part in ("1.0 loads in flight", "loads of 2 bytes", "shuffles", "times the goal"):
        assert part in row["fault"]


def test_products_of_integers_bound_a_kernel_and_a_device_may_have_a_share_of_its_own() -> None:
    product = "        /*0140*/  IMAD.WIDE.U32 R20, R4, R5, R20 ;\n"
    program = sass.parse(_HEAD + TOGETHER + product + _TAIL)
    goal = Goal(0.5, 1, min_loads=2, share_on={"B200": 0.25})
    rows = {
        name: roofline.row(program, DEVICES[name], Resources(64, 0, 32), goal=goal, element_size=2)
        for name in ("sm_90", "sm_100")
    }
    assert rows["sm_90"]["multiply_tb_s"] == pytest.approx(132 * 1.755e9 * 64 * 32 / 1e12)
    assert rows["sm_90"]["goal_tb_s"] == pytest.approx(0.5 * 4.3)
    assert rows["sm_100"]["goal_tb_s"] == pytest.approx(0.25 * 7.0)
    assert rows["sm_90"]["fault"] == rows["sm_100"]["fault"] == ""


@pytest.mark.parametrize(
    ("body", "goal", "fault"),
    [
        (TOGETHER, SmallGoal(waits=1), ""),
        (SUNK, SmallGoal(waits=1), "waits for memory 2 times"),
        (TOGETHER, SmallGoal(waits=1, has_loop=False), "a loop"),
    ],
)
def test_a_kernel_of_little_data_may_wait_so_often(body: str, goal: SmallGoal, fault: str) -> None:
    program = sass.parse(_HEAD + body + _TAIL)
    row = roofline.row(program, DEVICES["sm_90"], Resources(64, 0, 8), goal=goal, element_size=4)
    assert row["fault"] == fault and "goal_tb_s" not in row


def test_a_program_without_a_loop_is_one_pass() -> None:
    row = roofline.row(
        sass.parse(STORED),
        DEVICES["sm_90"],
        Resources(32, 0, 8),
        goal=Goal(0.8, 2, min_loads=2),
        element_size=2,
    )
    assert (row["waits"], row["load_bytes"], row["store_bytes"], row["fault"]) == (1, 16, 16, "")
