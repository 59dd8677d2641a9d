"""The search for rows over several DP ranks."""

from __future__ import annotations

import math

import numpy as np

from megapack.base.arrays import Floats, Ints
from megapack.cost.model import TOKENS
from megapack.errors import PlanError
from megapack.pipeline.simulator import Runner
from megapack.planner.counts import least_count
from megapack.planner.grid import Grid, GridCost, GridItems, empty_grid, grid_seconds, put
from megapack.planner.grid_search import fill_grid, improve_grid
from megapack.planner.problem import PADDING, StepDraft, StepProblem
from megapack.planner.profile import find_profile
from megapack.planner.scored import drafted_seconds

_STRETCHES = (1.0, 1.15, 1.35, 1.7)
import os
EVALS = int(os.environ.get("EVALS", 2000))
FINAL = int(os.environ.get("FINAL", 4000))
NB = int(os.environ.get("NB", 4))
DEBUG = bool(os.environ.get("DEBUG"))


def plan_wide_rows(problem: StepProblem, fixed: StepDraft | None) -> StepDraft:
    return _WideSearch(problem, fixed).run()


class _WideSearch:
    def __init__(self, problem, fixed):
        self.problem = problem
        self.fixed = fixed
        self.layout = layout = problem.layout
        self.policy = problem.policy
        self.by_tokens = problem.cost is None or self.policy.balance == "tokens"
        self.cost = TOKENS if self.by_tokens else problem.cost
        self.runner = Runner(layout, self.cost, problem.forward_only)
        self.widths = layout.widths
        sizes = [problem.at_width(w) for w in self.widths]
        self.items = GridItems(
            tokens=np.stack([s.aligned for s in sizes]),
            tokens_sq=np.stack([s.aligned_sq for s in sizes]),
            samples=problem.item_samples,
        )
        shares = np.array([self.cost.share_of_rank(layout, w) for w in self.widths])
        cap = self.policy.max_live_tokens_per_gpu
        self.row_cost = GridCost(
            fixed=float(self.cost.fixed),
            per_token=self.cost.per_token * shares,
            per_token_sq=self.cost.per_token_sq * shares,
            per_sample=self.cost.per_sample * shares,
            unit=np.array([layout.over(w).row_alignment for w in self.widths]),
            capacity=np.array([problem.capacity * w for w in self.widths]),
            max_live=0.0 if cap is None else float(cap * layout.cp * layout.vpp),
            lockstep=layout.ep_spans_dp,
            allows_padding=self.policy.unreachable == "pad",
        )
        c = self.row_cost
        self.seconds_WI = (
            c.per_token[:, None] * self.items.tokens
            + c.per_token_sq[:, None] * self.items.tokens_sq
            + c.per_sample[:, None] * self.items.samples
        )
        unit = c.unit[:, None]
        fits = -(-self.items.tokens // unit) * unit <= c.capacity[:, None]
        self.least = np.argmax(fits, axis=0)
        self.work = self.seconds_WI[0]
        self.order = np.lexsort((np.arange(self.work.size), -self.work, -self.least))

    def run(self):
        layout = self.layout
        group = layout.group_size
        cands = []
        for count in self.counts(group):
            cands += self.build(count, group)
        if self.fixed is not None:
            f = self.from_draft(self.fixed)
            cands.append(f)
        cands.sort(key=lambda c: c[0])
        best = []
        seen = {}
        for c in cands:
            k = c[1].first.shape[1]
            if seen.get(k, 0) >= 1 and c is not cands[0]:
                continue
            seen[k] = seen.get(k, 0) + 1
            best.append(c)
        best = best[:NB]
        if DEBUG:
            print("   start", [(round(c[0] * 1e3, 2), c[1].first.shape[1]) for c in best])
        out = []
        for s, grid, targets, g in best:
            ops = self.runner.ops(grid.first.shape[1], g)
            s = improve_grid(self.row_cost, self.items, grid, ops, self.order, self.least, targets, EVALS)
            out.append((s, grid, targets, g))
        out.sort(key=lambda c: c[0])
        if DEBUG:
            print("   then", [(round(c[0] * 1e3, 2), c[1].first.shape[1]) for c in out])
        s, grid, targets, g = out[0]
        ops = self.runner.ops(grid.first.shape[1], g)
        s = improve_grid(self.row_cost, self.items, grid, ops, self.order, self.least, targets, FINAL)
        if DEBUG:
            print("   end", s * 1e3)
        return self.draft(grid, g)

    def counts(self, group):
        layout = self.layout
        tokens = int(self.items.tokens[0].sum())
        least = layout.next_legal_count(-(-tokens // (self.problem.capacity * layout.dp)), self.policy.count_rule, group)
        mean = float(self.work.sum()) / layout.dp
        best = least
        if self.cost.fixed > 0:
            best = math.sqrt(mean / layout.vpp * (layout.pp - 1) / self.cost.fixed)
        top = max(least + group, min(int(2 * best), 6 * least), min(int(best), 40))
        wanted = [least + (top - least) * k * k // 81 for k in range(10)]
        if self.fixed is not None:
            wanted.append(self.fixed.rank_rows[0].size)
        legal = [layout.next_legal_count(c, self.policy.count_rule, group) for c in wanted]
        return sorted(dict.fromkeys(legal))

    def build(self, count, group):
        total = float(self.work.sum()) / self.layout.dp * 1.02
        cap = float(self.work.sum()) * self.problem.capacity / int(self.items.tokens[0].sum())
        profile = find_profile(self.runner, count, group, work=total, fixed=self.row_cost.fixed,
                               cap=cap, huge=np.zeros(0), rounds=8)
        targets = profile.targets(total, np.zeros(0), cap) + self.row_cost.fixed
        ops = self.runner.ops(count, group)
        end = np.empty((self.layout.dp, ops.stage.size))
        out = []
        for stretch in _STRETCHES:
            grid = empty_grid(self.row_cost, self.work.size, self.layout.dp, count)
            ok = fill_grid(self.row_cost, self.items, grid, self.order, self.least, targets, stretch,
                           np.array([1]), 0.0)
            if ok:
                s = grid_seconds(self.row_cost, grid, ops, end)
                out.append((float(s), grid, targets, group))
        return out

    def from_draft(self, draft):
        count = draft.rank_rows[0].size
        grid = empty_grid(self.row_cost, self.work.size, self.layout.dp, count)
        cell_of = {}
        for r, rows in enumerate(draft.rank_rows):
            for m, row in enumerate(rows.tolist()):
                if row >= 0:
                    cell_of[row] = r * count + m
        for i, row in enumerate(draft.row_of.tolist()):
            put(self.row_cost, self.items, grid, i, cell_of[row], 0)
        g = draft.group_size or self.layout.group_size
        ops = self.runner.ops(count, g)
        end = np.empty((self.layout.dp, ops.stage.size))
        s = grid_seconds(self.row_cost, grid, ops, end)
        targets = np.full(count, float(self.work.sum()) / self.layout.dp / count + self.row_cost.fixed)
        return float(s), grid, targets, g

    def draft(self, grid, group):
        dp, count = grid.first.shape
        used = np.flatnonzero(grid.num_items > 0)
        number = np.full(dp * count, PADDING)
        number[used] = np.arange(used.size)
        rows = tuple(number[grid.first[r] * count + np.arange(count)] for r in range(dp))
        return StepDraft(row_of=number[grid.row_of], rank_rows=rows,
                         group_size=group if self.layout.vpp > 1 else None,
                         widths=np.int64(1) << grid.level[used])
