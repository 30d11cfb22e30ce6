"""Recorded fine-tunes as a page: `trainstream report`.

`reading` knows the run folder's format, `series` what is drawn, `figures` how it is drawn, `page`
how the page is put together.
"""
