# Read by every bash of a script that `hpcrl import` runs (BASH_ENV): what is no tool of text is noted down, not run.
hpcrl_note() {
    printf '%s\0' "$@" > "$HPCRL_CALLS/${EPOCHREALTIME/[.,]/}-$BASHPID-$RANDOM"
}
command_not_found_handle() {
    hpcrl_note "$@"
}
sleep() { hpcrl_note sleep "$@"; }

# A file of model arguments that is missing is looked for in --models-dir, then among hpcrl's own names of models.
source() {
    local file=$1 folder
    shift
    if [[ ! -r $file ]]; then
        for folder in "$HPCRL_MODELS" "$HPCRL_OWN_MODELS"; do
            if [[ -n $folder && -r $folder/${file##*/} ]]; then
                [[ $folder == "$HPCRL_OWN_MODELS" ]] && hpcrl_note source "$file"
                builtin source "$folder/${file##*/}" "$@"
                return
            fi
        done
        hpcrl_note source-missing "$file"
        return 0
    fi
    builtin source "$file" "$@"
}
function . { source "$@"; }
