"""What services withstand: many texts (`soak`), too many clients (`overload`), long prompts
(`interference`) and hostile callers (`hostile`)."""
