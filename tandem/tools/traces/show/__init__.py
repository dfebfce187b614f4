"""Output of traces: tables, waterfalls, exports, the page of `tandem trace view`."""
