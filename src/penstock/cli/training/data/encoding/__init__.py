"""Rows to samples: what a row holds (`fields`), what of a conversation the assistant writes (`templates`), and the
token ids with their mask (`samples`).
"""
