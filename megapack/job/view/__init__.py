"""Pictures and pages of plans and runs.

Modules:
    records: a run's folder, read back
    timeline, plot, chrome_trace: simulated and measured timelines, drawn or for Perfetto
    page, web/: the HTML report; `plot` draws its steps and charts
"""
