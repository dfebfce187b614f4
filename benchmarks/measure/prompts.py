"""What the texts of every benchmark continue."""

PROMPTS = ("def ", "class ", "import os\n", "    for ", "    if not ", '"""', "# ", "return ")
