"""What tests share.

models      ten small models, each with parameters, and the batches that they take
engines     prepare a model, train it, and compare all that an engine holds
streams     devices on which nothing is asynchronous, and streams with delays of the test's choice
accelerator a device's module that is made up, with a log and a clock
ranks       several ranks on one machine
memory      memory, disks, rings and pinning of the test's choice
refusals    rows of what is refused, and the check that nothing has changed
covering    rows in which all pairs, or triples, of choices meet
fuzz        how many examples a property test draws
releases    what runs in two releases of other libraries
interrupts  an error at the n-th line of Penstock
"""
