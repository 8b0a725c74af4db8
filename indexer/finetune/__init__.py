"""Fine-tuning: full, LoRA, token selection (TokenTune), or both, for causal language models and sequence classifiers.

`indexer.finetune.run.finetune(out, FinetuneSettings(...))` is the Python entry. Nothing is imported here, so that the command line stays quick.
"""
