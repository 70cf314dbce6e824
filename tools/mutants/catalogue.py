"""The planted bugs. Each is a piece of the product that reads otherwise, and the tests one of which has to fail then.

What they break are the rules of the protocol whose absence its models showed to be fatal, and the bugs that others
shipped (RG). A text that is found no more, or more than once, is an error of this list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug.

    Shape: `old` becomes `new` in a file of the package; of a `.sql` file in the statement of a name alone. `breaks`
    says which promise or rule; `tests` are files, of which one test at least has to fail.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    statement: str | None = None


def _sql(name: str, breaks: str, table: str, statement: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, breaks, f"sql/{table}.sql", old, new, tests, statement)


_GRANT: Final = " AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'"
_FENCING, _TAKEOVER, _STEPS = "test_fencing", "test_service_takeover", "test_engine_steps"
_ROUTER, _WAITS, _TIMERS = "test_service_router", "test_engine_waits", "test_service_timers"
_RELAY, _REDISPATCH, _OPS = "test_service_relay", "test_service_redispatch", "test_effects"

MUTANTS: Final[tuple[Mutant, ...]] = (
    # -- fencing ------------------------------------------------------------------------------------------------------
    _sql("commit-without-token", "I5", "step", "commit_step", _GRANT, "", _FENCING, _TAKEOVER),
    _sql(
        "commit-without-lock",
        "I5",
        "step",
        "commit_step",
        "       FOR SHARE)\nINSERT",
        "       )\nINSERT",
        _FENCING,
        _TAKEOVER,
    ),
    _sql("items-without-token", "I5", "step", "commit_steps", _GRANT, "", "test_engine_map", "test_engine_parallel"),
    _sql("start-without-token", "I5, I7", "step", "start_step", _GRANT, "", _FENCING, _TAKEOVER),
    _sql("proof-without-token", "I7", "run", "prove_grant", _GRANT, "", _FENCING, _TAKEOVER),
    _sql(
        *("claim-of-a-running-run", "I4", "run", "claim_run"),
        "(state = 'ready' AND paused_at IS NULL",
        "(state IN ('ready', 'running') AND paused_at IS NULL",
        _FENCING,
    ),
    _sql(
        *("claim-without-lease", "I21", "run", "claim_run"),
        "AND EXISTS (SELECT 1 FROM {schema}.worker WHERE id = %(worker)s AND lease_until > {schema}.now())",
        "",
        _FENCING,
    ),
    _sql(
        *("claim-within-the-delay", "I7", "run", "claim_run"),
        " AND (wake_at IS NULL OR wake_at <= {schema}.now())",
        "",
        *(_TAKEOVER, _FENCING),
    ),
    _sql(
        *("claim-of-another-version", "I19", "run", "claim_run"),
        "AND (version = ANY(%(versions)s::int[]) OR (version IS NULL AND %(new)s))",
        "",
        *("test_service_refusals", "test_refused_hints", "test_code_changes", "test_engine"),
    ),
    _sql(
        *("claim-of-a-paused-run", "D10", "run", "claim_run"),
        "state = 'ready' AND paused_at IS NULL AND",
        "state = 'ready' AND",
        "test_pausing",
    ),
    _sql("finish-without-token", "I5, I12", "run", "finish_run", _GRANT, " AND state = 'running'", _FENCING, _TAKEOVER),
    # -- steps --------------------------------------------------------------------------------------------------------
    _sql(
        *("second-outcome-of-a-step", "I6", "step", "commit_step"),
        " WHERE step.state = 'started'\n",
        "\n",
        *(_STEPS, "test_engine_lost_replies", "test_engine_journal", _FENCING, "test_protocol_machine"),
    ),
    Mutant(
        "inputs-not-compared",
        "I6",
        "engine/replay.py",
        "entry.kind != kind or differ(entry.fingerprint, fingerprint)",
        "entry.kind != kind",
        ("test_engine_journal", _STEPS),
    ),
    Mutant(
        "raw-value-at-the-first-pass",
        "I6, I26",
        "engine/recording.py",
        "        return decoded\n",
        "        return value\n",
        (_STEPS, "test_values"),
    ),
    Mutant(
        "journal-digest-ignored",
        "I6",
        "engine/replay.py",
        "        if entry.result is not None:\n            check_digest",
        "        if False:\n            check_digest",
        ("test_engine_journal", _STEPS),
    ),
    Mutant(
        "no-explicit-grant-after-a-crash",
        "I14",
        "engine/attempt.py",
        "self._explicit = grant.crashes > 0",
        "self._explicit = False",
        (_FENCING, _STEPS),
    ),
    Mutant(
        "proof-of-any-age",
        "I7",
        "engine/attempt.py",
        "            and boottime() - self._proof <= PROOF_SECONDS\n",
        "",
        (_FENCING, "test_engine_edges", _STEPS),
    ),
    Mutant(
        "proof-counted-at-receipt",
        "I7",
        "engine/attempt.py",
        "        self._proof = None if cancel(reply) else sent\n        return reply",
        "        self._proof = None if cancel(reply) else boottime()\n        return reply",
        ("test_engine_edges", _FENCING),
    ),
    Mutant(
        "lease-relied-on-for-ever",
        "I7",
        "services/lease.py",
        "self.seconds * 2 / 3",
        "self.seconds * 1000",
        ("test_service_lease", "test_service_lease_held", _FENCING),
    ),
    Mutant(
        "key-of-an-attempt",
        "I15",
        "engine/context.py",
        '{self._pass.nesting}/{key}"',
        '{self._pass.attempt.token.fence}/{key}"',
        ("test_idempotency_keys", _STEPS, "test_engine_edges", "test_engine_failures"),
    ),
    # -- cancel -------------------------------------------------------------------------------------------------------
    _sql(
        *("step-begun-after-a-cancel", "I11", "step", "start_step"),
        "FROM r WHERE cancel_at IS NULL",
        "FROM r",
        *(_FENCING, "test_service_cancel", "test_engine_txstep"),
    ),
    _sql(
        "park-despite-a-cancel",
        "I11",
        "run",
        "suspend_run",
        " AND cancel_at IS NULL",
        "",
        _FENCING,
        "test_service_cancel",
        _WAITS,
    ),
    _sql(
        *("finish-despite-a-cancel", "I11", "run", "finish_run"),
        "state = CASE WHEN r.cancel THEN 'cancelled' ELSE %(state)s END",
        "state = %(state)s",
        *("test_service_cancel", _FENCING),
    ),
    # -- take-over ----------------------------------------------------------------------------------------------------
    _sql(
        *("take-over-from-a-stale-read", "RG-1", "run", "take_over_run"),
        "r.state = 'running' AND r.fence = %(fence)s",
        "true",
        _TAKEOVER,
    ),
    _sql(
        *("take-over-without-delay", "I7", "run", "take_over_run"),
        "ELSE {schema}.now() + %(delay)s::interval END",
        "ELSE {schema}.now() END",
        _TAKEOVER,
    ),
    _sql(
        *("take-over-of-a-renewed-lease", "RG-1", "run", "take_over_run"),
        "NOT %(only_dead)s OR",
        "true OR",
        _TAKEOVER,
    ),
    _sql(
        "crashes-not-counted", "I14", "run", "take_over_run", "ELSE c.crashes + 1 END", "ELSE c.crashes END", _FENCING
    ),
    _sql(
        "take-over-without-hint",
        "I1",
        "run",
        "take_over_run",
        "FROM u WHERE state = 'ready'",
        "FROM u WHERE false",
        _TAKEOVER,
    ),
    _sql(
        *("attempt-left-open", "B6", "run", "take_over_run"),
        "outcome = 'lost', error = %(why)s",
        "outcome = 'suspended', error = %(why)s",
        _TAKEOVER,
    ),
    # -- waits and facts ----------------------------------------------------------------------------------------------
    Mutant(
        "park-without-a-look",
        "I8",
        "engine/passing.py",
        "if waits.count_settled(guard.conn, guard.token.run, keys):",
        "if False:",
        (_WAITS, _ROUTER),
    ),
    Mutant(
        "register-without-a-look",
        "I8",
        "engine/waiting.py",
        "if cancel is False:\n                    contradicted",
        "if False:\n                    contradicted",
        (_WAITS, "test_engine_wait_groups"),
    ),
    Mutant(
        "register-without-the-address",
        "I8",
        "engine/waiting.py",
        "self._lock(guard)\n                point(",
        "point(",
        (_WAITS, _ROUTER, "test_engine_wait_groups"),
    ),
    Mutant(
        "router-skips-running-runs",
        "I8",
        "services/router.py",
        "if locked is None or locked.state.is_terminal:",
        "if locked is None or not locked.state.is_parked:",
        (_ROUTER,),
    ),
    Mutant(
        "router-without-the-address",
        "I8",
        "services/router.py",
        "        if not waits.try_lock_address(conn, address):\n            return _Chunk(RouteCounts())\n",
        "",
        (_ROUTER,),
    ),
    Mutant(
        "routed-though-skipped",
        "I8",
        "services/router.py",
        "if chunk.after is None and not chunk.skipped and is_last:",
        "if chunk.after is None:",
        (_ROUTER,),
    ),
    _sql(
        *("second-outcome-of-a-wait", "I9", "wait", "settle_wait"),
        " AND state = 'pending'\n",
        "\n",
        *(_ROUTER, _TIMERS, "test_engine_wait_groups"),
    ),
    _sql(
        *("wait-settled-again-by-its-check", "I9", "wait", "settle_wait_by_check"),
        " AND wait.state = 'pending'",
        "",
        *(_WAITS, "test_engine_wait_groups"),
    ),
    _sql(
        "sleep-ended-early",
        "I10",
        "run",
        "wake_due_runs",
        "wake_at <= (SELECT {schema}.now())\n",
        "wake_at <= (SELECT {schema}.now()) + interval '1 hour'\n",
        _TIMERS,
    ),
    _sql(
        *("sleep-prolonged-by-replay", "I10", "step", "start_sleep"),
        "DO UPDATE SET fence = excluded.fence WHERE",
        "DO UPDATE SET fence = excluded.fence, wake_at = excluded.wake_at WHERE",
        *(_WAITS, _STEPS),
    ),
    # -- what leaves --------------------------------------------------------------------------------------------------
    _sql(
        *("row-deleted-that-another-took", "I1", "outbox_event", "delete_events"),
        " AND claim = %(relay)s",
        "",
        _RELAY,
    ),
    _sql(
        *("rows-not-held-while-published", "I22", "outbox_event", "claim_events"),
        "next_attempt_at = {schema}.now() + %(hold)s::interval",
        "next_attempt_at = next_attempt_at",
        _RELAY,
    ),
    _sql(
        *("report-not-kept-for-the-finisher", "I13", "run", "finish_run"),
        "%(claim)s::uuid AS claim, %(hold)s::interval AS due",
        "NULL::uuid AS claim, interval '0' AS due",
        *(_FENCING, _STEPS, "test_service_lease_held", "test_engine_lost_replies"),
    ),
    _sql(
        *("no-second-report-after-a-loss", "I13", "run", "finish_run"),
        "WHERE %(report)s AND EXISTS",
        "WHERE false AND EXISTS",
        *(_FENCING, _RELAY, _TAKEOVER),
    ),
    Mutant(
        "hint-copied-into-a-backlog",
        "I22",
        "services/redispatch.py",
        "return depth + queues.reserved.get(queue, 0) < FULL_ENOUGH * queues.ready.get(queue, 0)",
        "return True",
        (_REDISPATCH,),
    ),
    Mutant(
        "hints-in-hand-forgotten",
        "I22",
        "services/redispatch.py",
        "depth + queues.reserved.get(queue, 0)",
        "depth",
        (_REDISPATCH,),
    ),
    _sql(
        "redispatch-without-doubling",
        "I22",
        "run",
        "redispatch_runs",
        "power(2, least(greatest(redelivers, 0) + 1, 20))",
        "1",
        _REDISPATCH,
    ),
    _sql(
        "hand-over-without-hint",
        "I1",
        "run",
        "hand_over_run",
        "FROM u\nON CONFLICT",
        "FROM u WHERE false\nON CONFLICT",
        "test_hand_over",
    ),
    # -- effects ------------------------------------------------------------------------------------------------------
    _sql(
        "op-settled-by-a-stale-turn",
        "I15",
        "op_ledger",
        "settle_op",
        "AND o.token = %(token)s",
        "",
        _OPS,
        "test_effect_policies",
    ),
    _sql(
        *("op-taken-without-comparing", "I15", "op_ledger", "take_op"),
        " AND o.token = %(held)s",
        "",
        *(_OPS, "test_effect_policies"),
    ),
    _sql(
        *("op-never-busy", "I15", "op_ledger", "read_op"),
        "coalesce(r.state = 'running' AND r.fence = o.fence AND r.claim = o.claim, false)",
        "false",
        *("test_effect_policies", _OPS),
    ),
    # -- children -----------------------------------------------------------------------------------------------------
    _sql(
        "parent-goes-on-too-early",
        "I17",
        "run",
        "is_joined",
        "SELECT NOT EXISTS",
        "SELECT true OR NOT EXISTS",
        "test_engine_children",
    ),
    _sql(
        *("children-without-token", "I5, I17", "run", "insert_children"),
        _GRANT,
        "",
        *("test_engine_children", "test_engine_spreading"),
    ),
)
