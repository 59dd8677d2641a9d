"""The search for a step's fastest legal plan. `megapack.build_dp_schedule` is its face.

    problem -> counts -> profile -> bins, partition -> state, scored -> refine -> problem.build_step

One step at a time: `search` tries drafts in a fixed order and spends a fixed number of simulated
ranks, so that every rank of a job finds the same plan.
"""
