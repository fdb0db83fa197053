"""The page of a run, `penstock report`.

run.py reads a folder, timeline.py the trace in it. charts.py makes charts and their tables as values. page.py makes one
file of them, with data that markup.py keeps from being markup. page.html, page.css and page.js are the frame.
"""
