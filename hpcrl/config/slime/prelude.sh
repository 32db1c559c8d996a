# Read by every bash of a script that `hpcrl import` runs (BASH_ENV): what is not a tool of text is noted down, not run.
# It is unknown whether such a command would have succeeded, so `set -e` and its like do not end the script.

HPCRL_HOME=${BASH_SOURCE[0]%/*} # next to it are bin, with tools (links) and what notes itself down, and models

hpcrl_write() { printf '%s\0' "$@" > "$HPCRL_CALLS/${EPOCHREALTIME/[.,]/}-$BASHPID-$RANDOM"; }
hpcrl_note() {
    local hpcrl_word hpcrl_file
    hpcrl_write "$@"
    for hpcrl_word in "$@"; do
        hpcrl_file=${hpcrl_word#--*=}
        [[ $hpcrl_file == "$TMPDIR"/* && -f $hpcrl_file && -w $hpcrl_file ]] && # of its own: it ends with the sandbox
            hpcrl_write hpcrl-file "$hpcrl_file" "$(< "$hpcrl_file")"
        # a command line in one word, as of `docker exec NAME bash -c "..."`
        [[ $hpcrl_word =~ [[:space:]]([^[:space:]]*/)?train(_async)?\.py[[:space:]] ]] && bash -c "$hpcrl_word"
    done
    return 0
}
command_not_found_handle() {
    if [[ $1 == --[a-z]* ]]; then # no command: a line of flags, as after a line without its backslash
        hpcrl_note hpcrl-array "${BASH_LINENO[0]}" "$@"
    else
        hpcrl_note "$@"
    fi
}

# ---- before each command (DEBUG trap; a status other than 0 leaves the command out)

hpcrl_before() {
    local hpcrl_command=$BASH_COMMAND
    shopt -s extdebug # a bash that is just starting would look for its debugger
    case $hpcrl_command in
        "set -o "* | "set -"[a-zA-Z]*)
            [[ $hpcrl_command =~ ^set( +(-[a-zA-Z]+|errexit|nounset|pipefail|xtrace))+$ ]] && return 1
            return 0
            ;;
        "trap "*" ERR" | "trap "*" DEBUG") return 1 ;;
        "exec "[!0-9\<\>\&]*)
            hpcrl_by_path "${hpcrl_command#exec }" || eval "${hpcrl_command#exec }"
            exit
            ;;
    esac
    if [[ $hpcrl_command =~ ^[\"\']?[\$/~.] ]]; then
        hpcrl_by_path "$hpcrl_command" && return 1
    fi
    if [[ $hpcrl_command =~ ^[^=\ ]*\ .*train(_async)?\.py\ .*\> ]] && [[ ! $hpcrl_command =~ ^(echo|printf|cat|export|local)\  ]]; then
        hpcrl_without_redirections "$hpcrl_command" && return 1
    fi
    return 0
}

# Note down a command that is named by its path; status 1: it is a tool of text, a script of bash's, or not named so.
hpcrl_by_path() {
    local hpcrl_words hpcrl_line
    [[ $1 =~ ^([^[:space:]]+) ]] || return 1
    eval "hpcrl_words=(${BASH_REMATCH[1]})" 2> /dev/null || return 1
    [[ ${hpcrl_words[0]-} == */* ]] || return 1
    [[ -L $HPCRL_HOME/bin/${hpcrl_words[0]##*/} ]] && return 1
    if [[ -f ${hpcrl_words[0]} && -r ${hpcrl_words[0]} ]]; then
        IFS= read -r -n 64 -d $'\n' hpcrl_line < "${hpcrl_words[0]}" 2> /dev/null
        [[ $hpcrl_line =~ ^#!.*[/\ ](ba|da)?sh ]] && return 1
    fi
    hpcrl_without_redirections "$1"
}

# Where its output would go cannot be written to.
hpcrl_without_redirections() {
    local hpcrl_line=$1
    while [[ $hpcrl_line =~ ^(.*[^\ ])\ +[012\&]?\>.*$ ]]; do
        hpcrl_line=${BASH_REMATCH[1]}
    done
    eval "hpcrl_note $hpcrl_line" 2> /dev/null
}

# ---- commands of bash's own, and tools that would find nothing to work on here

HPCRL_SLEPT=0
sleep() {
    hpcrl_note sleep "$@"
    if ((++HPCRL_SLEPT > 100)); then
        echo "line ${BASH_LINENO[0]} waits without end" >&2
        exit 75
    fi
}
kill() { hpcrl_note kill "$@" && [[ ${1-} != -0 ]]; }
cd() { builtin cd "$@" 2> /dev/null || hpcrl_note cd "$@"; }
pushd() { builtin pushd "$@" 2> /dev/null || hpcrl_note cd "$@"; }
mkdir() { command mkdir "$@" 2> /dev/null || hpcrl_note mkdir "$@"; }
which() { command -v "$@"; }
for hpcrl_name in "$HPCRL_HOME"/bin/*; do # whatever becomes of PATH
    [[ -L $hpcrl_name ]] || eval "${hpcrl_name##*/}() { hpcrl_note ${hpcrl_name##*/} \"\$@\"; }"
done

# A file of model arguments that is missing is looked for in --models-dir, then among hpcrl's own names of models.
source() {
    local file=$1 folder
    shift
    case ${file##*/} in
        .bashrc | .bash_profile | .profile | activate | conda.sh)
            hpcrl_note environment "$file"
            return 0
            ;;
    esac
    if [[ ! -r $file ]]; then
        for folder in "$HPCRL_MODELS" "$HPCRL_HOME/models"; do
            if [[ -n $folder && -r $folder/${file##*/} ]]; then
                [[ $folder == "$HPCRL_HOME/models" ]] && hpcrl_note source "$file" "$PWD"
                builtin source "$folder/${file##*/}" "$@"
                return
            fi
        done
        hpcrl_note source-missing "$file" "$PWD"
        return 0
    fi
    builtin source "$file" "$@"
}
# shellcheck source=/dev/null
function . { source "$@"; }

trap hpcrl_before DEBUG
