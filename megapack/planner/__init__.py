"""The search for a step's fastest legal plan; `megapack.build_dp_schedule` calls it.

    Step, Items -> counts -> choose -> Draft -> StepPlan

    choose   search    rows on one DP rank each: profile, uneven -> bins, partition -> scored
             sharing   the same for parts of families, and for loose samples: families
             wide      rows over several DP ranks: board, clock -> fill, annealing
             operations   pieces of samples, split backwards: pieces, own_orders
    scored   board, clock -> moves
    explain  plans of the same samples with one freedom changed, for `Plan.explain`

Each step is planned alone. `search` tries drafts in a fixed order and simulates a fixed number of
ranks, so that every rank of a job finds the same plan.
"""
