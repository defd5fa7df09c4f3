// Browsers start no worker for a page that is opened as a file. Then the search runs in a hidden frame instead, which
// Material for MkDocs expects under this name.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => this.load(next)), Promise.resolve())
      this.ready = this.load(url)
    }

    load(url) {
      const script = this.inside.document.createElement("script")
      script.src = new URL(url, location.href).href
      return new Promise((resolve, reject) => {
        script.onload = resolve
        script.onerror = () => reject(new Error(`${url} cannot be loaded`))
        this.inside.document.body.appendChild(script)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.inside.frameElement.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
