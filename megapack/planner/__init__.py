"""The search for a step's fastest legal plan; `megapack.build_dp_schedule` calls it.

    problem -> counts -> profile, uneven -> bins, partition -> state, scored -> refine
    -> problem.build_step

    a draft, and rows over several DP ranks -> wide: grid, grid_fill, grid_search -> the same
    a draft, pieces of samples, split backwards -> operations: pieces, weight_fill, piece_moves

Each step is planned alone. `search` tries drafts in a fixed order and simulates a fixed number of
ranks, so that every rank of a job finds the same plan.
"""
