"""Traces for a reader: tables, waterfalls, exports, the page of `tandem trace view`."""
