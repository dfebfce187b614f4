"""What `tandem demo` and `tandem bench` continue where nobody names another prompt."""

PROMPTS = ("def ", "import os\n", "class ", "    def __init__(self")
