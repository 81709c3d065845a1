"""A release of SGLang, its environment, and the processes of an engine. It must not know what is asked of one."""
