complete -c verl -f -n __fish_use_subcommand -a "@VERBS@"
complete -c verl -n "not __fish_use_subcommand" -a "@KEYS@"
