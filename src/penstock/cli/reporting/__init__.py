"""The page of a run, `penstock report`.

run.py reads a folder, timeline.py the trace in it. thin.py leaves as many points as a chart shows; chart.py is a chart
and its table as a value, which curves.py and bars.py make. sections.py puts them in order, page.py makes one file of
them, with data that markup.py keeps from being markup. page.html, page.css and page.js are the frame.
"""
