"""The page of a run, `penstock report`.

run.py reads a folder, timeline.py the trace in it. thin.py leaves as many points as a chart shows, curves.py and
bars.py say what the charts draw, tables.py what the tables say; sections.py puts them in order, page.py makes one file
of them. resources.py names the rows of traces. page.html, page.css and page.js are the frame.
"""
