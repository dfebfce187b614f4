"""What the commands show: texts, tables and reports."""
