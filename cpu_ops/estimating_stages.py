"""The optional stages of a retrieval step: groups, estimated masses, keys of candidates, single tokens, and the rest.

They take the rows of one `Run`. Where lists of blocks may differ between kv heads, arrays have one row per block and
kv head.
"""

import numpy as np

from hetero_kv.cpu_ops.block_groups import (
    entry_ids,
    for_every_head,
    forget_missing,
    group_ids,
    groups_of,
    masses_of,
    numbers_into,
    opened_entries,
    places_of,
    positions_at,
)
from hetero_kv.cpu_ops.chosen_tokens import pool_blocks
from hetero_kv.cpu_ops.device_function import kernel_part
from hetero_kv.cpu_ops.estimated_masses import take_out
from hetero_kv.cpu_ops.estimating_run import Groups, Scores
from hetero_kv.cpu_ops.kernel_address import call_kernel
from hetero_kv.cpu_ops.parallel_region import run_region
from hetero_kv.cpu_ops.step_contract import (
    CANDIDATES,
    CHOOSE,
    CHOOSE_TOKENS,
    CHOSEN,
    GROUPS,
    LOOK,
    OPENED,
    REST,
    RESTER,
    RUN,
    SCORE,
    SCORED,
    SCORER,
)
from hetero_kv.cpu_ops.step_parts import (
    by_head,
    copy_into,
    head_row,
    head_rows,
    scale_and_cap,
    sums_of_powers,
)
from hetero_kv.cpu_ops.untyped_arrays import UNTYPED, UNTYPED_POOL


@kernel_part
def score_groups(run, group_vectors, settings, calls):
    """Score the groups of blocks, and open those with the best scores, or with blocks at given or allowed positions.

    group_vectors: [num_blocks, kv_heads, 1 or 2, k_dim], as bound. Returns `Groups`.
    """
    rows, kv_heads, group, _ = run.queries.shape
    blocks, lists, size = run.context.shape[1], run.positions.shape[1], settings.group_blocks
    fixed = run.allowed if run.which == CHOSEN else run.positions
    number = blocks // size if size > 1 else 0
    most = fixed.shape[2]
    if most == 0:
        most = -(-run.most * settings.group_factor // size)
    if most >= number:
        number, most = 0, 0
    opened = np.empty((rows, lists, most), np.int32)
    likely = np.empty((rows, kv_heads, group, number), np.float32)
    weights, masses = np.empty(likely.shape, np.float32), np.empty(likely.shape, np.float32)
    ids = group_ids(run.context, size, number)
    chooses = run.which == CHOSEN and fixed.shape[2] == 0
    if number > 0 and (settings.has_mean or chooses):
        run.taken[:, GROUPS] = number * lists
        if settings.has_mean:
            arguments = (
                run.queries, group_vectors, ids, settings.block_size * size, run.scale, run.softcap, likely, weights,
                masses,
            )  # fmt: skip
            run_region("mean scores", UNTYPED, calls[RUN], calls[SCORE], settings.threads, arguments)
        else:
            in_use = np.full(rows, number, np.int32)
            scoring = calls[RUN], calls[SCORE], run.queries, group_vectors, ids, in_use, settings.threads, likely
            call_kernel("score", UNTYPED, calls[SCORER], scoring)
            scale_and_cap(likely, np.float32(run.scale), np.float32(run.softcap))
    if fixed.shape[2] > 0:
        groups_of(fixed, size, number, opened)
    elif number > 0:
        choose_args = (
            likely, likely, False, run.outside_lse, run.outside_lse, run.allowed, run.shared, settings.reduce, 0.0,
            np.int64(0), most, np.int64(1), np.full(rows, number, np.int32), opened,
        )  # fmt: skip
        run_region("choose", "", calls[RUN], calls[CHOOSE], settings.threads, choose_args)
    return Groups(number, ids, opened, weights, masses)


@kernel_part
def score_blocks(run, groups, vectors, coarse, settings, calls):
    """Score the blocks of opened groups by their representatives, or by the keys of all. Returns `Scores`.

    vectors: representatives, as bound. coarse: the keys and means by which candidates are scored.
    """
    rows, kv_heads, group, k_dim = run.queries.shape
    entries = opened_entries(groups.opened, settings.group_blocks, groups.number, run.counts)
    count, each_row = entries.shape[2], rows * kv_heads
    ids = entry_ids(run.context, entries, kv_heads)
    likely = np.empty((rows, kv_heads, group, count), np.float32)
    weights = masses = np.empty((rows, kv_heads, group, 0), np.float32)
    by_row = run.queries.reshape(each_row, 1, group, k_dim)
    looks_at_all = settings.has_mean != 0 and settings.rerank == 0 and run.which == CHOSEN
    if settings.has_mean:
        weights, masses = np.empty(likely.shape, np.float32), np.empty(likely.shape, np.float32)
    # Scoring coarse copies also computes the means' scores.
    scores_means = settings.has_mean != 0 and not (looks_at_all and settings.has_codes)
    if scores_means:
        mean_args = (
            by_row, by_head(vectors), ids, settings.block_size, run.scale, run.softcap, head_rows(likely),
            head_rows(weights), head_rows(masses),
        )  # fmt: skip
        run_region("mean scores", UNTYPED, calls[RUN], calls[SCORE], settings.threads, mean_args)
    unchoosable_lse = np.full((rows, kv_heads, group), -np.inf, np.float32)
    counts = run.counts if groups.number == 0 else np.full(rows, count, np.int32)
    found = Scores(entries, ids, likely, counts, weights, masses, unchoosable_lse, looks_at_all)
    if looks_at_all:
        numbers_into(run.taken, CANDIDATES, entries)
        every, unread = np.empty((each_row, 1, 0), np.int32), np.empty((each_row, 1, group, 0), np.float32)
        look(run, found, every, unread, coarse, settings, calls)
    elif run.which == CHOSEN and not settings.has_mean:
        in_use = np.full(each_row, count, np.int32)
        scoring = (
            calls[RUN], calls[SCORE], by_row, by_head(vectors), ids, in_use, settings.threads, head_rows(likely)
        )  # fmt: skip
        call_kernel("score", UNTYPED, calls[SCORER], scoring)
        scale_and_cap(likely, np.float32(run.scale), np.float32(run.softcap))
    if settings.has_mean or run.which == CHOSEN:
        scored = numbers_into(run.taken, SCORED, entries)
        if settings.has_mean and not scores_means:
            run.taken[:, SCORED] = 0
        if scored < entries.size:
            forget_missing(likely, entries)
            forget_missing(weights, entries)
            forget_missing(masses, entries)
    if settings.has_mean:
        take_out(groups.weights, groups.opened)
        take_out(groups.masses, groups.opened)
        copy_into(masses_of(groups.masses), unchoosable_lse)
    numbers_into(run.taken, OPENED, groups.opened)
    return found


@kernel_part
def look(run, scores, places, token_scores, coarse, settings, calls):
    """Score the keys of candidates, and put their masses where estimates were.

    places: [rows * kv_heads, 1, n] int32, the candidates among the scored blocks; n = 0 means all. token_scores:
    [rows * kv_heads, 1, group, n * block_size] float32, written; or of length 0. Masses that are known from a look at
    all keys are left as they are.
    """
    each_row, group, k_dim = scores.ids.shape[0], run.queries.shape[2], run.queries.shape[3]
    weights, masses = head_rows(scores.weights), head_rows(scores.masses)
    if scores.looks_at_all and places.shape[2] > 0:
        weights = masses = np.empty((each_row, 1, group, 0), np.float32)
    arguments = (
        run.queries.reshape(each_row, 1, group, k_dim), by_head(coarse[0]), by_head(coarse[1]), scores.ids, places,
        run.scale, run.softcap, weights, masses, token_scores,
    )  # fmt: skip
    run_region("candidates", UNTYPED_POOL, calls[RUN], calls[LOOK], settings.threads, arguments)


@kernel_part
def choose_blocks(run, scores, outside_lse, coarse, settings, calls):
    """Choose blocks by scores and masses, and write their positions; of candidates that are looked at, by their keys.

    Where single tokens are chosen (`settings.tokens`), these are the blocks that contain candidates. Returns the places
    of the blocks among the scored ones: [rows, lists, run.most] int32, padded with -1.
    """
    rows, kv_heads, group, count = scores.likely.shape
    lists, most, has_allowed = run.positions.shape[1], run.most, run.allowed.shape[2] > 0
    looks, by_token = settings.has_mean and settings.rerank > 1, settings.tokens > 0
    by = scores.masses if scores.looks_at_all else scores.likely
    among = places_of(run.allowed, scores.entries) if has_allowed else run.allowed
    room = run.allowed.shape[2] if has_allowed else count
    places = np.empty((rows, lists, most), np.int32)
    top_k, times, proposed = most, settings.rerank if looks else np.int64(1), places
    if by_token:
        # Tokens are chosen from all proposed blocks.
        top_k, times = min(settings.tokens // settings.block_size, most), settings.candidates
    elif looks:
        proposed = np.empty((rows, lists, min(most * settings.rerank, room)), np.int32)
    choose_args = (
        by, scores.masses, scores.looks_at_all, outside_lse, scores.unchoosable_lse, among, run.shared, settings.reduce,
        run.target, settings.least, top_k, times, scores.counts, proposed,
    )  # fmt: skip
    run_region("choose", "", calls[RUN], calls[CHOOSE], settings.threads, choose_args)
    if looks and not by_token:
        unread = np.empty((rows * kv_heads, 1, group, 0), np.float32)
        look(run, scores, for_every_head(proposed, kv_heads), unread, coarse, settings, calls)
        numbers_into(run.taken, CANDIDATES, proposed)
        choose_args = (
            scores.masses, scores.masses, True, outside_lse, scores.unchoosable_lse, proposed, run.shared,
            settings.reduce, run.target, settings.least, most, np.int64(1), scores.counts, places,
        )  # fmt: skip
        run_region("choose", "", calls[RUN], calls[CHOOSE], settings.threads, choose_args)
    run.positions[:] = -1
    positions_at(places, scores.entries, run.positions)
    return places


@kernel_part
def choose_tokens(run, scores, places, outside_lse, coarse, settings, calls):
    """Choose single tokens of the blocks at `places` among the scored ones.

    Returns the tokens [rows, lists, n * block_size or more], which are `run.recorded` unless that is empty, their
    counts [rows, lists, 3], and the blocks [rows, lists, n] that have any (`chosen_tokens.choosing_arguments`).
    """
    rows, kv_heads, group, _ = scores.likely.shape
    lists, size = places.shape[1], settings.block_size
    if not scores.looks_at_all:
        numbers_into(run.taken, CANDIDATES, places)
    token_scores = np.empty((rows, kv_heads, group, places.shape[2] * size), np.float32)
    every = for_every_head(places, kv_heads)
    look(run, scores, every, head_rows(token_scores), coarse, settings, calls)
    chosen = run.recorded
    if chosen.size == 0:
        chosen = np.empty((rows, lists, token_scores.shape[3]), np.int32)
    counts = np.empty((rows, lists, 3), np.int32)
    blocks = pool_blocks(places, scores.entries, run.context)
    arguments = (
        token_scores, places, blocks, scores.weights, scores.masses, scores.counts, outside_lse,
        scores.unchoosable_lse, run.shared, settings.reduce, run.target, settings.least * size, settings.tokens, chosen,
        counts,
    )  # fmt: skip
    run_region("choose tokens", "", calls[RUN], calls[CHOOSE_TOKENS], settings.threads, arguments)
    return chosen, counts, blocks


@kernel_part
def add_rest(run, groups, scores, means, is_known, settings, calls):
    """Estimate the mass of what is not attended to, and let its mean values count where `settings.adds_rest`.

    Updates `run.attended` and `run.lse`. means: mean values of blocks and groups, as bound. is_known: whether the mass
    of everything, estimated, is written to `run.mass`.
    """
    total, adds_rest = np.empty(run.lse.shape, np.float32), settings.adds_rest != 0
    rows, kv_heads = run.lse.shape[:2]
    # As in calls of their own: threads divide lists elsewhere with more rows, and sums are rounded otherwise.
    at_once = 1 if run.drafted else rows
    for start in range(0, rows, at_once):
        stop = start + at_once
        weights, masses = scores.weights[start:stop], scores.masses[start:stop]
        counts = scores.counts[start:stop].repeat(kv_heads)
        arguments = (
            calls[RUN], calls[REST], by_head(means[0]), scores.ids[start * kv_heads : stop * kv_heads], counts,
            head_rows(weights), head_rows(masses), adds_rest, settings.threads, head_rows(run.attended[start:stop]),
            head_row(run.lse[start:stop]), head_row(total[start:stop]),
        )  # fmt: skip
        call_kernel("rest", UNTYPED, calls[RESTER], arguments)
    if is_known:
        copy_into(sums_of_powers(total, scores.unchoosable_lse), run.mass)
    if groups.number > 0 and adds_rest:
        for start in range(0, rows, at_once):
            stop = start + at_once
            counts = np.full(stop - start, groups.number, np.int32)
            arguments = (
                calls[RUN], calls[REST], means[1], groups.ids[start:stop], counts, groups.weights[start:stop],
                groups.masses[start:stop], adds_rest, settings.threads, run.attended[start:stop], run.lse[start:stop],
                total[start:stop],
            )  # fmt: skip
            call_kernel("rest", UNTYPED, calls[RESTER], arguments)
