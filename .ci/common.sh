# Shared by ./demo and ./runtests: sourced in the repository's root, with `set -euo pipefail`.

say() { printf '%s\n' "== $*" >&2; }

# Installs what is missing of the packages in the groups named; asks nothing, and does nothing where all is there.
install_packages() {
    local group package missing=() as_root=()
    while read -r group package; do
        case " $* " in *" $group "*) ;; *) continue ;; esac
        [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
    done < <(grep -v '^#' .ci/packages)
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || { echo "$0: as root, run: apt-get install ${missing[*]}" >&2; return 1; }
        as_root=(sudo)
    fi
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    "${as_root[@]}" apt-get -qq update
    "${as_root[@]}" apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null </dev/null
}

# Configures the build folder $1 once, with the further arguments for meson setup.
configure() {
    local folder=$1
    shift
    [ -f "$folder/build.ninja" ] || meson setup "$folder" "$@" >"$folder.log" 2>&1 || { cat "$folder.log" >&2; return 1; }
    rm -f "$folder.log"
}
