"""Pictures and pages of plans and runs.

Modules:
    records: a run's folder, read back
    timeline, plot: simulated and measured timelines, drawn
    page, web/: the HTML report; `plot` draws its steps and charts
"""
