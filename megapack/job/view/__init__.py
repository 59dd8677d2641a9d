"""Pictures and pages of plans and runs.

Modules:
    records: a run's folder, read back
    timeline, plot, chrome_trace: simulated and measured timelines, drawn or for Perfetto
    page, page_data, web/: the HTML report
"""
