"""What `--data` names, read row by row.

sources.py finds the files and data sets, rows.py reads the rows of one. formats.py tells files apart by name and by
content. text.py reads text, objects.py JSON, tables.py CSV, parquet and Arrow, hub.py what the library datasets keeps.
"""
