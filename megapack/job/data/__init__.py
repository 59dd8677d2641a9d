"""Rollouts from files to batches, without torch.

Modules:
    files, lines: JSON Lines and Parquet -> checked samples
    tokenizer, hf_tokenizer, chats: text and chats -> token ids, and what counts in the loss
    images: images of a row -> places among its tokens, and pixels
    rollouts: the format of a line; batches of whole prompt groups
    balance: batches of about equal work
    advantages: rewards of rollouts -> advantages
    token_blocks, workers: tokenization, by several processes
    processes: a process that answers messages
    index, dataset: random access to any sample
    lengths: lengths alone, for the planner's commands
    generated, toy, toy_images: toy rollouts; tiny models with chats
    batches: config -> data set -> batches -> plans
"""
