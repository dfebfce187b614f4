"""What services bear: many texts (`soak`), too many clients (`overload`), long prompts
(`interference`) and callers that mean harm (`hostile`)."""
