"""The search for a step's fastest legal plan; `megapack.build_dp_schedule` calls it.

Read `search` first: pack, order, improve. What it calls, in the order of the data:

    batch, step, items     the samples, what stays the same in a step, what is packed whole
    counts, refusals       which rollouts train when, how many rows; what cannot be planned
    families, cuts         items as parts of families, samples and families in pieces
    targets                how long each row should take
    images                 which GPU encodes each image
    starts: bins, fill     items into rows, on one rank or several
    board, clock, orders   the draft in arrays, its seconds, orders that stages choose
    improve                moves while they make the step faster
    wide, pieces           the same for rows over several ranks, and for pieces and own orders
    scored, draft          a simulated board, and the draft that becomes a `StepPlan`
    explain                what each freedom gains
"""
