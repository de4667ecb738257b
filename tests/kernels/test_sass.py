"""Counting what one tile executes, on SASS that shows every case."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from kernels.sass import executed, parse

TEXT = """
        /*0000*/                   LDC R1, c[0x0][0x37c] ;          /* 0x1 */
                                                                    /* 0x2 */
        /*0010*/              @!P0 BRA 0x50 ;                       /* 0x1 */
        /*0020*/                   MOV R2, 0x50 ;                   /* 0x1 */
        /*0030*/                   CALL.REL.NOINC 0x120 ;           /* 0x1 */
        /*0040*/                   NOP ;                            /* 0x1 */
        /*0050*/                   FADD R0, R1, R2 ;                /* 0x1 */
        /*0060*/                   FMUL2 R0, R1, R2 ;               /* 0x1 */
        /*0070*/               @P1 BRA 0x50 ;                       /* 0x1 */
        /*0080*/               @P2 BRA 0xa0 ;                       /* 0x1 */
        /*0090*/                   STG.E.64 desc[UR4][R2.64], R0 ;  /* 0x1 */
        /*00a0*/               @P3 EXIT ;                           /* 0x1 */
        /*00b0*/                   REDG.E.ADD.64 desc[UR4][R2.64] ; /* 0x1 */
        /*00c0*/                   EXIT ;                           /* 0x1 */
        /*00d0*/                   BRA 0xd0;                        /* 0x1 */
        /*00e0*/                   NOP;                             /* 0x1 */
"""


def test_lines_become_instructions():
    instructions = parse(TEXT)
    assert len(instructions) == 15
    assert instructions[1].predicate == "@!P0"
    assert instructions[1].target == 0x50
    assert instructions[9].operation == "STG.E.64"


def test_loops_count_by_trips_and_slow_paths_and_stubs_not_at_all():
    counts = executed(parse(TEXT), trips=(3,))
    assert counts["FADD"] == counts["FMUL2"] == 3
    assert counts["CALL.REL.NOINC"] == counts["MOV"] == counts["NOP"] == 0
    assert counts["STG.E.64"] == 1  # what a condition may skip counts
    assert counts["BRA"] == 1 + 3 + 1  # over the call, the loop's, over the store; no trap
    assert counts["EXIT"] == 2


def test_a_cold_path_after_a_conditional_exit_does_not_count():
    counts = executed(parse(TEXT), trips=(3,), cold=r"CALL|REDG\..*ADD")
    assert counts["REDG.E.ADD.64"] == 0
    assert counts["EXIT"] == 1


def test_an_unexpected_loop_is_refused():
    with pytest.raises(ValueError, match="1 loops, but trips are given for 0"):
        executed(parse(TEXT))
