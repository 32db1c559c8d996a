"""What tests share. Each module is named here (tests/test_suite.py compares).

Real parts, started once and forked or shared
    ranks              trainer ranks of Megatron-core, forked from a process that has imported it
    forked_engines     vLLM servers, forked likewise; `engines` drives them, `breakable` can spoil them; `vllm_on_cpu`
                       carries vLLM's own weight transfer
    cluster            a Slurm and MPI cluster in namespaces; `unkind` is one with the habits of real sites, `torn_srun`
                       tears the lines of its output
    quick_start        the README's quick start, run once for all tests that look at a finished run

Whole runs
    runs, first_steps  `hpcrl run` of a tiny model, and what it left behind; a folder of `hpcrl init`, used as its README says
    slurm, batch       runs submitted to Slurm; to real Slurm and to a fake one alike
    fake_slurm         Slurm's programs without daemons and without root, which run jobs on this machine
    must_not_learn, learning_picture    rewards that teach nothing; table and picture of what was learned
    ledger_account     from what a run wrote of its groups, what became of each
    small_recipes      the shipped recipes for GPUs with small models; `planted_faults`, `wrong_losses`: what can be wrong
    twins, twin_models    tiny twins of the reference runs of slime's guides and scripts; what they train
    second_user, gloo_attack    an account from which tests attack what runs under the first; what it does to gloo groups
    asked_samples      what a custom generate function is called with
    asked_endpoint     an endpoint in front of a policy that says what a test wants; models of each form of tool calls
    other_kinds        an account whose processes make sandboxes by bubblewrap, or by a newer release's Apptainer
    boxes              an event loop with a pool of sandboxes, for tests that are no coroutines
    faults             the campaign of faults: kinds of faults, places where runs are struck, what must hold afterwards

Models and data
    tiny, families, layouts, published_models    a model that fits in a test; two of each family; random layouts of both
                       sides of a weight update; slime's flags and config.json of published models
    options, shares    the least options of a run; samples, and shares of the queue made of them
    two_ways, answers    a tokenizer of several ways to write a text; answers with their truth
    tiny_verifiers_taskset    a taskset of verifiers 0.4
    harbor_tasks       task folders in Harbor's form
    mtp_models         models whose checkpoints have a layer that predicts a further token
    fp8                what an engine multiplies with: the values of FP8 codes and scales

Stand-ins where the real part cannot be had, or must misbehave
    fused_layers       what Transformer Engine's layers keep for the backward pass, on that device
    absent_torchvision, absent    names that vLLM's module for images imports; the folder that gives them to a process
    fake_engine, http_server, queues    servers that answer what a test says
    rehearsed_engines  engines put through vLLM's choices on a machine with H100s that is not there
    out_of_memory, full_scheduler    ranks and engines that run out of memory in mid-run
    own_generates, own_rewards, own_slimes    functions as users write them, good and bad, also for slime;
    stand_in_trackers  packages in place of wandb, trackio and mlflow, which write down every call
    slimes_examples    slime's own examples from a checkout, with stand-ins for what they reach outside

The machine
    able               what it can do, asked once; tests that need what is not there are skipped, with the reason
    cpu_seconds        a plugin of pytest: what each folder of tests costs, which CI compares with tests/baseline.toml
    children           the next line of a process that a test has started, within a time
    caches             what hpcrl remembers of it, forgotten after each test
    restricted         a command run as in Docker, which makes no namespaces and no mounts

Looking
    sources            the sources as syntax trees, each parsed and walked once
    prompt_walk        which files a process enters between two calls
    rundirs, screens, live_bytes        run directories as launchers leave them; what a terminal shows; bytes of tensors alive
    trained_on_fake    one rollout trained on the device of hpcrl/planning/rehearsal, and the waits that it took
    simulated_loops, virtual_time    the three loops over simulated engines; an event loop whose time is made up
    compilations       a C++ compiler that counts what it compiles
    real_memory        the step of a rehearsal with real tensors, and what torch's allocator gave out in it
    allowed_waits      where the host may wait for the device, how often, and why
    status_watch       what `hpcrl status` says through requeues and losses, held against Slurm's own word
"""
