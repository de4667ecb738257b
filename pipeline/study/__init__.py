"""`compare +study=...`: runs that differ in one thing, and an honest report of how they differ.

plan.py      which runs a study has, each under a name that tells its configuration
queue.py     runs them, some at a time; what is finished is never repeated
reuse.py     what finished elsewhere, from its tables
tables.py    what the runs left, as small CSV files: the report is a function of these alone
statistics.py  paired gaps, their intervals, and the power to see a difference
report.py    verdicts, tables and figures, as HTML and PNG
"""
