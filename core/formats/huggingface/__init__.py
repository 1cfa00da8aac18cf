"""Other files of a Hugging Face directory, and directories with pytorch_model.bin.

Start at ``files`` (configuration, tokenizer, licence, which are copied as they are) and ``index``
(the file of each tensor).
"""
