"""Pictures and pages of plans and runs.

records                          what a run wrote, read back
timeline, plot, chrome_trace     simulated and measured timelines
page, page_data, web/            the HTML report
"""
